"""Loops and instruction counts read from disassembly, on listings small enough to count by hand."""

from __future__ import annotations

import pytest

from rspo_kernels.machine_code import Instruction, count, loops, outside, parse_amd, parse_sass, passes, width

SASS = """
	.section	.text.k,"ax",@progbits
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.64 R2, desc[UR16][R2.64] ;
        /*0020*/              @P0  BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   LDG.E.128 R4, desc[UR16][R44.64] ;
        /*0040*/                   LDG.E.128 R8, desc[UR16][R44.64+0x10] ;
        /*0050*/                   FADD R4, R4, R5 ;
        /*0060*/                   FFMA R4, R4, R5, R6 ;
        /*0070*/                   MUFU.EX2 R4, R4 ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0090*/                   STG.E.64 desc[UR16][R2.64], R4 ;
        /*00a0*/                   IMAD.U32 R5, R5, 0x10000, RZ ;
        /*00b0*/                   NOP ;
        /*00c0*/              @!P1 BRA `(.L_x_1) ;
.L_x_2:
        /*00d0*/               @P1 LDG.E.U16 R4, desc[UR16][R44.64] ;
        /*00e0*/                   BRA.U UP0, `(.L_x_2) ;
        /*00f0*/                   STG.E desc[UR16][R2.64], R4 ;
        /*0100*/                   EXIT ;
.L_x_3:
        /*0110*/                   BRA `(.L_x_3);
        /*0120*/                   NOP ;
"""
"""A pass of 16 bytes at once, a loop over single elements, and the trap behind the end."""

MATMUL = """
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   CS2R R4, SRZ ;
.L_x_2:
        /*0020*/                   UTMALDG.2D [UR4], [UR6] ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R4, gdesc[UR8], R4 ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/                   F2FP.BF16.F32.PACK_AB R4, R4, R5 ;
        /*0060*/                   FMNMX R4, R4, R5, !PT ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""

AMD = """
kernel:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
	s_branch .LBB0_3
.LBB0_2:                                ;   in Loop: Header=BB0_3 Depth=1
	s_or_b64 exec, exec, s[4:5]
	v_add_f32_e32 v1, v1, v9
	s_cbranch_scc0 .LBB0_4
.LBB0_3:                                ; =>This Inner Loop Header: Depth=1
	v_exp_f32_e32 v3, v3                ; a comment, with words
	s_and_saveexec_b64 s[4:5], vcc
	s_cbranch_execz .LBB0_2
; %bb.1:
	buffer_load_dwordx4 v[36:39], v19, s[4:7], 0 offen
	ds_bpermute_b32 v1, v2, v3
	s_nop 0
	s_branch .LBB0_2
.LBB0_4:
	global_load_ushort v9, v[8:9], off
	global_store_dword v0, v1, s[0:1]
	s_endpgm
	.section	.rodata,"a",@progbits
	.amdhsa_kernel kernel
"""
"""A loop that is entered in its middle and whose last block falls through to its first."""


def test_a_pass_is_the_loop_with_the_widest_loads():
    code = parse_sass(SASS)
    wide, narrow = loops(code)
    assert (wide.bytes("load"), wide.width("load"), wide.bytes("store")) == (32, 16, 8)
    assert (narrow.bytes("load"), narrow.innermost) == (2, True)
    assert count(wide.own) == {"load": 2, "store": 1, "arithmetic": 2, "special": 1, "threads": 1, "other": 2}
    assert len(outside(code)) == 7, "three before, two after the loops, and what never runs"
    (found,) = passes(code, (2,), 0, 256)
    assert found.total == 9 / 16, "a thread takes 32 bytes, 16 elements, in an iteration"
    assert found.counts["load"] == 2 / 16
    assert (found.load, found.store) == (16, 8)


def test_an_unrolled_loop_is_divided_by_all_its_elements():
    body = "\n".join(SASS.split("\n")[8:15])
    twice = SASS.replace(body, body + "\n" + body)
    (once,), (unrolled,) = (passes(parse_sass(text), (2,), 0, 256) for text in (SASS, twice))
    assert unrolled.counts["special"] == once.counts["special"]
    assert unrolled.total < once.total, "the branch is shared"


def test_each_pass_has_its_own_cost_and_the_last_stands_for_the_rest():
    loop = SASS[SASS.index(".L_x_1:") : SASS.index(".L_x_2:")]
    again = "".join(loop.replace("L_x_1", f"L_x_{i}") for i in (5, 6, 7))
    costs = [found.counts["special"] for found in passes(parse_sass(again), (2, 4), 0, 256)]
    assert costs == [1 / 16, 1 / 8, 1 / 8]


def test_a_tile_costs_what_stands_around_its_matmul():
    outer, inner = loops(parse_sass(MATMUL))
    assert (outer.innermost, inner.around) == (False, (outer.start,))
    assert [x.name for x in outer.own] == ["CS2R", "F2FP.BF16.F32.PACK_AB", "FMNMX", "BRA"]
    (found,) = passes(parse_sass(MATMUL), (), 512, 256)
    assert found.total == 4 / 2
    assert "matrix" not in found.counts
    alone = MATMUL.replace("@P1 BRA `(.L_x_1)", "MOV R0, R1")
    (found,) = passes(parse_sass(alone), (), 512, 256)
    assert found.total == 6 / 2, "all but the matmul's loop"


def test_without_elements_there_are_no_passes():
    assert passes(parse_sass(SASS), (), 0, 256) == ()
    assert passes([], (2,), 0, 256) == ()
    assert passes(parse_sass("/*0000*/ EXIT ;"), (2,), 0, 256) == ()


def test_an_amd_loop_whose_parts_are_out_of_order():
    code = parse_amd(AMD)
    assert code[-1].name == "s_endpgm"
    (loop,) = loops(code)
    assert loop.bytes("load") == 16
    assert count(loop.own) == {"special": 1, "arithmetic": 1, "load": 1, "threads": 1, "other": 5}
    assert width(code, "store") == 4
    assert [x.name for x in outside(code)] == [
        "s_load_dwordx2", "s_branch", "global_load_ushort", "global_store_dword", "s_endpgm",
    ]  # fmt: skip


def test_a_loop_that_is_left_by_a_call():
    """ptxas writes some jumps so; what follows the inner loop must not be lost to the outer one."""
    left = MATMUL.replace("@P0 BRA `(.L_x_2) ;", "@P0 CALL.REL.NOINC `(.L_x_3) ;\n/*0048*/ BRA `(.L_x_2) ;\n.L_x_3:")
    outer, inner = loops(parse_sass(left))
    assert inner.around == (outer.start,)
    assert count(outer.own)["arithmetic"] == 2


def test_code_before_a_jump_back_is_no_loop():
    """A block that was moved in front of its only user is reached from elsewhere too: nothing repeats."""
    moved = """
        /*0000*/               @P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0010*/                   MOV R1, R2 ;
        /*0020*/                   EXIT ;
.L_x_2:
        /*0030*/                   MOV R3, R4 ;
        /*0040*/                   BRA `(.L_x_1) ;
"""
    assert loops(parse_sass(moved)) == []


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("LDG.E.128", "load", 16),
        ("LDG.E.128.CONSTANT", "load", 16),
        ("LDG.E.ENL2.256", "load", 32),
        ("LDG.E.U16", "load", 2),
        ("LDG.E.S8", "load", 1),
        ("LDG.E", "load", 4),
        ("LDGSTS.E.BYPASS.128", "load", 16),
        ("UTMALDG.2D", "load", 0),
        ("STG.E.64", "store", 8),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "store", 0),
        ("LDS.128", "threads", 0),
        ("SHFL.BFLY", "threads", 0),
        ("HGMMA.64x256x16.F32.BF16", "matrix", 0),
        ("UTCHMMA", "matrix", 0),
        ("MUFU.EX2", "special", 0),
        ("FMNMX3", "arithmetic", 0),
        ("FFMA2", "arithmetic", 0),
        ("HFMA2.BF16_V2", "arithmetic", 0),
        ("F2FP.BF16.F32.PACK_AB", "arithmetic", 0),
        ("LDC.64", "other", 0),
        ("IMAD.U32", "other", 0),
        ("buffer_load_dwordx4", "load", 16),
        ("global_load_dword", "load", 4),
        ("global_load_ubyte", "load", 1),
        ("global_load_short_d16_hi", "load", 2),
        ("global_load_sshort", "load", 2),
        ("s_load_dwordx4", "load", 0),
        ("global_store_short", "store", 2),
        ("buffer_store_dwordx2", "store", 8),
        ("global_atomic_add_f32", "store", 0),
        ("ds_read_b128", "threads", 0),
        ("v_add_f32_dpp", "threads", 0),
        ("v_mfma_f32_32x32x8_bf16_1k", "matrix", 0),
        ("v_exp_f32_e32", "special", 0),
        ("v_pk_mul_f32", "arithmetic", 0),
        ("v_cvt_f32_i32_e32", "arithmetic", 0),
        ("v_lshlrev_b32_e32", "other", 0),
    ],
)
def test_classes_and_sizes(name, kind, size):
    instruction = Instruction(name)
    assert (instruction.kind, instruction.bytes) == (kind, size)
