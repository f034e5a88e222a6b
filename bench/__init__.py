"""Speed, memory, traffic and machine code of rspo_kernels and rspo beside the other libraries of the field."""
