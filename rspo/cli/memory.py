"""How much memory of a device a run takes: calculated from a model's shape and a few settings, before anything is made.

Weights, gradients and optimiser states are exact. What a micro-batch keeps for its backward pass is exact for decoders
of Llama's kind (RMSNorm, gated MLP) as transformers writes them.
Everything else that lives for a moment is estimated by its largest part, and what the allocator loses to fragments is
not in it: leave a tenth of the device free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..models.shapes import ModelShape

FLOAT32 = 4
CHUNK_ROWS = 2560
"""Rows whose logits the fused loss makes at once on a GPU, at most."""
USABLE = 0.9
"""Share of a device's memory that an estimate may fill."""


@dataclass(frozen=True)
class MemorySetup:
    """What decides on memory.

    Args:
        shape: of the policy, its reference and its critic.
        weight_bytes: of one weight as the model computes with it; below 4, float32 masters are trained beside.
        ranks: processes, each with a device of its own.
        sharded: float32 weights, gradients and optimiser states are spread over the ranks (FSDP), and a layer's weights
            are put together in the model's dtype for as long as it computes.
        adapter_rank: LoRA: the model is frozen and an adapter of this rank in float32 is trained. 0: all weights are.
        agent_b: while there are two agents, B is a full copy on the "device", a copy while A waits in the CPU's memory
            ("offload"), an adapter over A's weights ("adapter"), or there is "none".
        adapter_rank_b: of B's adapter.
        reference: a frozen copy of the start policy is kept (with LoRA: the adapter switched off, no copy).
        critic: "none", "own" body as large as the policy's, or "shared".
        micro_batch_tokens: tokens of one training pass.
        micro_batch_responses: response tokens among them.
        eager: attention keeps the matrix of its weights, which the others do not.
        checkpointing: layers are computed again in the backward pass, and only their inputs are kept.
        fused: the loss makes logits a chunk at a time.
        generated_rows: sequences that the training model generates at once; 0: another engine does, elsewhere.
        prompt_tokens, response_tokens: the longest of one sequence.
    """

    shape: ModelShape
    weight_bytes: int = 2
    ranks: int = 1
    sharded: bool = False
    adapter_rank: int = 0
    agent_b: str = "device"
    adapter_rank_b: int = 32
    reference: bool = True
    critic: str = "none"
    micro_batch_tokens: int = 16384
    micro_batch_responses: int = 4096
    eager: bool = False
    checkpointing: bool = True
    fused: bool = True
    generated_rows: int = 64
    prompt_tokens: int = 4096
    response_tokens: int = 512

    @property
    def parts(self) -> dict[str, int]:
        """Bytes that stay on a device between two updates, by what they are, at the moment when they are most: while
        there are two agents, where there are. A's gradients are gone then."""
        trained, is_alone = self._trained, self.agent_b in ("none", "offload")
        parts = {"weights": trained.weights, "float32 masters": trained.masters}
        if self.adapter_rank:
            parts = {"weights, frozen": self._frozen, "adapter": trained.masters}
        parts["Adam's moments"] = trained.moments
        parts["gradients"] = trained.gradients if is_alone else 0
        parts["critic"] = self._critic.total - (0 if is_alone else self._critic.gradients)
        parts["agent B"] = 0 if is_alone else self._agent_b
        parts["reference"] = self._frozen if self.reference and not self.adapter_rank else 0
        return {name: size for name, size in parts.items() if size}

    @property
    def phases(self) -> dict[str, int]:
        """Bytes that come and go on a device: only one of them is there at a time."""
        return {
            "generation": self.kv_cache + self.prefill,
            "a micro-batch": self.activations + self.head + self._gathered_layers,
            "the optimiser's step": self._step,
        }

    @property
    def peak(self) -> int:
        """Most bytes at once: what stays, and the largest phase."""
        return sum(self.parts.values()) + max(self.phases.values())

    @property
    def host(self) -> int:
        """Bytes in the CPU's memory, of each process: agent A, while it waits for B."""
        if self.agent_b != "offload":
            return 0
        return sum(part.total - part.gradients for part in (self._trained, self._critic))

    @property
    def kv_cache(self) -> int:
        """Keys and values of the sequences that are generated at once."""
        a_token = 2 * self.shape.layers * self.shape.kv_width * self.weight_bytes
        return self.generated_rows * (self.prompt_tokens + self.response_tokens) * a_token

    @property
    def prefill(self) -> int:
        """The widest moment of reading the prompts, inside a gated MLP, which is where a forward pass without a graph
        is at its largest; where weights are sharded, also the whole model, put together for the rollout."""
        if not self.generated_rows:
            return 0
        numbers = 2 * self.shape.hidden_size + 3 * self.shape.intermediate_size
        gathered = self.shape.parameters * self.weight_bytes if self.sharded else 0
        return self.generated_rows * self.prompt_tokens * numbers * self.weight_bytes + gathered

    @property
    def activations(self) -> int:
        """What a micro-batch keeps for its backward pass up to the last hidden states, those of a critic's own body
        included."""
        passes = 2 if self.critic == "own" else 1
        return passes * self.micro_batch_tokens * self.graph_bytes_per_token

    @property
    def graph_bytes_per_token(self) -> int:
        """Bytes of a training pass's graph for one token."""
        layers, layer = self.shape.layers, self.layer_graph_bytes
        input_bytes = self.shape.hidden_size * self.weight_bytes
        inside = layers * input_bytes + layer if self.checkpointing else layers * layer
        positions = 2 * self.shape.head_dim * self.weight_bytes  # cosines and sines
        return inside + self._norm_graph_bytes(self.shape.hidden_size, trained=not self.adapter_rank) + positions + 8

    @property
    def layer_graph_bytes(self) -> int:
        """Bytes of one layer's graph for one token: what transformers' modules save for their backward pass."""
        shape, size, full = self.shape, self.weight_bytes, not self.adapter_rank
        hidden, inner = shape.hidden_size, shape.intermediate_size
        query, kv = shape.query_width, shape.kv_width
        norms = shape.layer_norms * self._norm_graph_bytes(hidden, trained=full)
        if self.eager:  # q, k and v for each head, the output; the weights, in float32 and in the model's dtype
            width = self.prompt_tokens + self.response_tokens
            kept = FLOAT32 + (size if size < FLOAT32 else 0)
            attention = 4 * query * size + shape.heads * width * kept
        else:
            attention = (2 * query + 2 * kv) * size + FLOAT32 * shape.heads  # q, k, v, the output, its log-sum
        if shape.qk_norm:
            head_norm = self._norm_graph_bytes(shape.head_dim, trained=full)
            attention += (shape.heads + shape.kv_heads) * head_norm
        mlp = 3 * inner * size  # the gate before and after its activation, and what it is multiplied with
        if full:  # and the inputs of the linear layers, as far as they are not among these
            inputs = (2 * hidden + inner) * size
        else:  # peft's adapters take a float32 input each, and keep what their first matrix makes of it
            copied = 5 * hidden + query + inner if size < FLOAT32 else 2 * hidden + inner
            inputs = (copied + 7 * self.adapter_rank) * FLOAT32
        return norms + attention + mlp + inputs

    def _norm_graph_bytes(self, width: int, trained: bool) -> int:
        """RMSNorm: its input in float32, one number for each row, and where its weight is trained the normalised
        input."""
        return FLOAT32 * width + FLOAT32 + (self.weight_bytes * width if trained else 0)

    @property
    def logits(self) -> int:
        """Logits of a micro-batch's response tokens and their gradient, as far as they are made at once."""
        return 2 * self.micro_batch_responses * self.shape.vocab_size * self.weight_bytes

    @property
    def head(self) -> int:
        """What the output head and the loss need in a micro-batch."""
        hidden = 2 * self.micro_batch_responses * self.shape.hidden_size * self.weight_bytes
        weight = 0 if self.adapter_rank else self.shape.vocab_size * self.shape.hidden_size
        if not self.fused:
            return self.logits + hidden + weight * self.weight_bytes
        chunk = min(self.micro_batch_responses, CHUNK_ROWS) * self.shape.vocab_size * self.weight_bytes
        # The gradient of the head's weight is summed up in float32, to which chunks add theirs in the model's dtype.
        return chunk + hidden + weight * (FLOAT32 + self.weight_bytes)

    @property
    def _trained(self) -> Trained:
        return Trained.of(self, self.shape.parameters)

    @property
    def _critic(self) -> Trained:
        """Its body, where it has its own, and its head, which is float32."""
        head = Trained.in_float32(self.shape.hidden_size + 1)
        if self.critic == "own":
            return Trained.of(self, self.shape.body_parameters) + head
        return head if self.critic == "shared" else Trained.in_float32(0)

    @property
    def _agent_b(self) -> int:
        twin = replace(self, adapter_rank=self.adapter_rank_b) if self.agent_b == "adapter" else self
        return twin._trained.total + twin._critic.total

    @property
    def _frozen(self) -> int:
        """A copy of the policy that is not trained; shares of one are float32."""
        if self.sharded:
            return -(-self.shape.parameters // self.ranks) * FLOAT32
        return self.shape.parameters * self.weight_bytes

    @property
    def _gathered_layers(self) -> int:
        """Of sharded weights what is put together at once: a layer, the next one, the embeddings and the head; and the
        embeddings' gradient, on its way to the ranks in float32."""
        if not self.sharded:
            return 0
        shape = self.shape
        embeddings = shape.vocab_size * shape.hidden_size
        outer = shape.parameters - shape.body_parameters + embeddings
        layer = (shape.body_parameters - embeddings) // shape.layers
        return self.weight_bytes * (2 * outer + 2 * layer) + FLOAT32 * outer

    @property
    def _step(self) -> int:
        """The gradients in the masters' precision, and the root of all second moments, which AdamW on a GPU takes at
        once."""
        return max(part.moments // 2 + part.masters * bool(part.weights) for part in (self._trained, self._critic))


@dataclass(frozen=True)
class Trained:
    """Bytes on a device of weights that an optimiser changes, after a first update.

    weights: as the model computes with them.  masters: in float32, where those are not; all there is, where weights
    are 0.
    """

    weights: int
    masters: int
    moments: int
    gradients: int

    @classmethod
    def of(cls, setup: MemorySetup, parameters: int) -> Trained:
        """Of this many weights; under LoRA of an adapter in float32, whatever their number."""
        if setup.adapter_rank:
            return cls.in_float32(setup.shape.adapter_parameters(setup.adapter_rank))
        if setup.sharded:
            return cls.in_float32(-(-parameters // setup.ranks))
        size = setup.weight_bytes
        masters = FLOAT32 * parameters if size < FLOAT32 else 0
        return cls(size * parameters, masters, 2 * FLOAT32 * parameters, size * parameters)

    @classmethod
    def in_float32(cls, parameters: int) -> Trained:
        """Of weights that are their own masters."""
        return cls(0, FLOAT32 * parameters, 2 * FLOAT32 * parameters, FLOAT32 * parameters)

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.masters + self.moments + self.gradients

    def __add__(self, other: Trained) -> Trained:
        return Trained(
            self.weights + other.weights,
            self.masters + other.masters,
            self.moments + other.moments,
            self.gradients + other.gradients,
        )
