"""Loops and instructions of compiled kernels, read from their disassembly: NVIDIA's SASS or AMD's assembly.

What a kernel costs beyond memory traffic is decided in its loops: instructions that a thread issues for each element.
An H200 issues about 128·132·1.7e9 of them a second, of exponentials and their like an eighth of that; at 4.3 TB/s it
reads 2.1e12 bf16 elements. Above about 13 instructions or 1.7 exponentials for an element that is read, and twice as
many for one that is read and written, it is no longer memory that sets the pace.

Only text is analysed. Blocks are joined by branches and falling through; a loop is what leads back to a block that all
ways into it pass. That finds bodies whose parts were moved out of line, and leaves aside code that merely stands before
a jump to it. A call of a label is how ptxas writes some jumps; other calls and computed branches are not followed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

CLASSES = {
    "matrix": r"[A-Z]*MMA|v_s?mfmac?",
    "load": r"LDG|LDGSTS|LD|UTMALDG|UBLKCP|(global|buffer|flat|s)_(buffer_)?load",
    "store": r"STG|ST|RED|ATOMG?|UTMASTG|UTMAREDG|(global|buffer|flat)_(store|atomic)",
    "threads": r"LDSM?|STSM?|ATOMS|SHFL|REDUX|BAR|SYNCS|WARPSYNC|VOTEU?|MATCH|LDTM|STTM"
    r"|ds_|s_barrier|.*_dpp|v_readlane",
    "special": r"MUFU|v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
    "arithmetic": r"[HFD](ADD|MUL|FMA|MNMX3?|SETP?|SEL|CHK|SWZADD|2FP?)2?|H\w+2|v_\w*_b?f(16|32|64)",
}
"""Of instructions, by the start of their names, the first that fits; all others are `other` (integers, moves, jumps).

`load` and `store` are of global memory (s_load too), `threads` is what threads exchange through shared memory, shuffles
and barriers, `special` the unit for exponentials and reciprocals, `arithmetic` that of floating-point numbers."""

KINDS = (*CLASSES, "other")

BRANCHES = r"CALL|BRA|BRX|JMP|JMX|JMXU|BRXU|s_branch|s_cbranch\w*"
ENDS = r"EXIT|RET|s_endpgm|s_setpc_b64"
NO_WORK = ("NOP", "s_nop", "s_code_end")


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly; `labels` are those that stand right before it."""

    name: str
    operands: str = ""
    predicate: str = ""
    labels: tuple[str, ...] = ()

    @cached_property
    def kind(self) -> str:
        return next(
            (kind for kind, names in CLASSES.items() if re.match(rf"(?:{names})(?![A-Z0-9])", self.name)), "other"
        )

    @property
    def target(self) -> str | None:
        """The label that a branch jumps to."""
        if not self.is_branch:
            return None
        found = re.findall(r"\.L\w+", self.operands)
        return found[-1] if found else None

    @property
    def is_branch(self) -> bool:
        return re.fullmatch(rf"(?:{BRANCHES})(?:\..*)?", self.name) is not None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction can follow."""
        if re.fullmatch(rf"(?:{ENDS})(?:\..*)?", self.name):
            return bool(self.predicate)
        if not self.is_branch:
            return True
        # Conditions stand before the instruction or, for uniform branches, before the label.
        conditional = bool(self.predicate) or "cbranch" in self.name or "," in self.operands
        return conditional or self.name.startswith("CALL")

    @cached_property
    def bytes(self) -> int:
        """What a thread moves between itself and global memory; 0 for bulk copies, which are not a thread's."""
        if self.kind not in ("load", "store") or re.match(r"RED|ATOM|U|s_|\w+_atomic", self.name):
            return 0
        if self.name[0].isupper():
            width = re.search(r"\.[US]?(8|16|32|64|128|256)(?=\.|$)", self.name)
            return int(width[1]) // 8 if width else 4
        words = re.search(r"_dword(?:x(\d))?|_b(\d+)|_([us]?byte|[us]?short)", self.name)
        if words is None:
            return 4
        if words[3]:
            return 1 if "byte" in words[3] else 2
        return int(words[2]) // 8 if words[2] else 4 * int(words[1] or 1)


@dataclass(frozen=True)
class Loop:
    """A loop: its first instruction's number, its instructions without those of the loops inside it (`own`), and the
    starts of the loops around it, the outermost first."""

    start: int
    own: tuple[Instruction, ...]
    around: tuple[int, ...]
    innermost: bool

    @property
    def counts(self) -> Counter[str]:
        """Instructions by class."""
        return count(self.own)

    def bytes(self, kind: str) -> int:
        """What a thread loads or stores in an iteration, by the `own` instructions."""
        return sum(instruction.bytes for instruction in self.own if instruction.kind == kind)

    def width(self, kind: str) -> int:
        """Bytes of the widest load or store."""
        return width(self.own, kind)


def width(instructions: Iterable[Instruction], kind: str) -> int:
    """Bytes of the widest access of a kind, "load" or "store", among the instructions."""
    return max((instruction.bytes for instruction in instructions if instruction.kind == kind), default=0)


def count(instructions: Iterable[Instruction]) -> Counter[str]:
    """Instructions by class, without those that do nothing."""
    return Counter(instruction.kind for instruction in instructions if instruction.name not in NO_WORK)


def parse_sass(text: str) -> list[Instruction]:
    """From `nvdisasm --print-code` of a cubin with one kernel."""
    pattern = re.compile(
        r"^\s*(?P<label>\.L\w+):|/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<predicate>@!?U?P\w+)?\s*(?P<name>[A-Z][\w.]*)(?P<operands>[^;]*);",
        re.MULTILINE,
    )
    return _collect(pattern.finditer(text))


def parse_amd(text: str) -> list[Instruction]:
    """From the assembly that the AMD compiler writes, of one kernel."""
    code = re.split(r"^\s*(?:\.Lfunc_end|\.section\s+\.rodata)", text, maxsplit=1, flags=re.MULTILINE)[0]
    pattern = re.compile(
        r"^(?P<label>\.L\w+):|^\s+(?P<predicate>)(?P<name>[a-z]+_\w+)(?P<operands>[^;\n]*)", re.MULTILINE
    )
    return _collect(pattern.finditer(code))


def _collect(matches: Iterable[re.Match[str]]) -> list[Instruction]:
    found: list[Instruction] = []
    labels: list[str] = []
    for match in matches:
        if match["label"]:
            labels.append(match["label"])
        else:
            name, operands, predicate = match["name"], match["operands"].strip(), match["predicate"] or ""
            found.append(Instruction(name, operands, predicate, tuple(labels)))
            labels = []
    return found


@dataclass(frozen=True)
class Pass:
    """What a kernel does once for each element: by class, the instructions that a thread issues for one.

    `load` and `store` are the widest accesses of global memory there, in bytes; 0 for bulk copies.
    """

    counts: dict[str, float]
    load: int
    store: int

    @property
    def total(self) -> float:
        return sum(self.counts.values())


def passes(
    instructions: Sequence[Instruction], reads: Sequence[float], elements: int, threads: int
) -> tuple[Pass, ...]:
    """The passes over a kernel's elements, in the order of the code.

    With `reads`, bytes that an element costs in each pass, they are the innermost loops with the widest loads: others
    look at a few elements again or clear memory. A thread's elements in an iteration are told by what it loads, however
    the compilers unrolled it. With `elements` of a thread block instead, it is one pass: the code around the loops with
    matrix instructions (what a tile costs beside its multiplication), or what is in no loop.
    """
    found = loops(instructions)
    if reads:
        candidates = [loop for loop in found if loop.innermost]
        widest = max((loop.width("load") for loop in candidates), default=0)
        hot = [loop for loop in candidates if widest and loop.width("load") == widest]
        costs = [*reads, *[reads[-1]] * len(hot)]
        return tuple(_pass(loop.own, loop.bytes("load") / cost) for loop, cost in zip(hot, costs, strict=False))
    if elements:
        around = {loop.around[-1] for loop in found if loop.around and loop.counts["matrix"]}
        code = next((loop.own for loop in found if loop.start in around), outside(instructions))
        return (_pass(code, elements / threads),)
    return ()


def _pass(code: Sequence[Instruction], elements: float) -> Pass:
    counts = {kind: number / elements for kind, number in sorted(count(code).items())}
    return Pass(counts, width(code, "load"), width(code, "store"))


def loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """All loops in the order in which they start; loops with a common start are one."""
    blocks, edges = _blocks(instructions)
    before: list[list[int]] = [[] for _ in blocks]
    for source, targets in enumerate(edges):
        for target in targets:
            before[target].append(source)
    reached = _reached(edges)
    bodies: dict[int, set[int]] = {}
    for source in reached:
        for header in edges[source]:
            body = _leading_to(source, header, before)
            # A way from the start that avoids the header: not a loop, or one that can be entered beside its header.
            if header == 0 or 0 not in body:
                bodies.setdefault(header, set()).update(body & reached)
    found = []
    for header, body in sorted(bodies.items()):
        inside = [other for other in bodies.values() if other < body]
        around = [start for start, other in sorted(bodies.items()) if start != header and body < other]
        own = sorted(body.difference(*inside))
        code = tuple(instructions[i] for block in own for i in blocks[block])
        found.append(Loop(blocks[header].start, code, tuple(blocks[start].start for start in around), not inside))
    return found


def outside(instructions: Sequence[Instruction]) -> list[Instruction]:
    """What is in no loop."""
    looped = Counter(id(instruction) for loop in loops(instructions) for instruction in loop.own)
    return [instruction for instruction in instructions if id(instruction) not in looped]


def _reached(edges: Sequence[Sequence[int]]) -> set[int]:
    """The blocks that can run at all: behind the end stand a trap for runaway programs and padding."""
    found: set[int] = set()
    waiting = [0] if edges else []
    while waiting:
        block = waiting.pop()
        if block not in found:
            found.add(block)
            waiting += edges[block]
    return found


def _leading_to(source: int, header: int, before: Sequence[Sequence[int]]) -> set[int]:
    """The blocks from which `source` is reached without passing `header`, and these two."""
    body, waiting = {header}, [source]
    while waiting:
        block = waiting.pop()
        if block not in body:
            body.add(block)
            waiting += before[block]
    return body


def _blocks(instructions: Sequence[Instruction]) -> tuple[list[range], list[list[int]]]:
    """Ranges of instructions that run one after the other, and which blocks can follow each."""
    starts = {0} | {i for i, instruction in enumerate(instructions) if instruction.labels}
    starts |= {i + 1 for i, x in enumerate(instructions) if x.is_branch or not x.falls_through}
    cuts = [*sorted(start for start in starts if start < len(instructions)), len(instructions)]
    blocks = [range(a, b) for a, b in pairwise(cuts)]
    labels = {name: i for i, block in enumerate(blocks) for name in instructions[block.start].labels}
    edges = []
    for i, block in enumerate(blocks):
        last = instructions[block[-1]]
        following = [labels[last.target]] if last.target in labels else []
        if last.falls_through and i + 1 < len(blocks):
            following.append(i + 1)
        edges.append(following)
    return blocks, edges
