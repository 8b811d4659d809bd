# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""The Hopper kernel's role ``gather``: packed keys fetched, decoded in registers and left in shared memory as bf16.

Seven groups of 64 bytes of each key are on their way at any time, as many as there are registers for: a group that has
been decoded makes room for one of the next block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_triton.hopper.layouts import (
    BLOCK,
    KEYS,
    NOTED,
    ONE,
    PIECE_KEYS,
    PIECES,
    PLAIN,
    SWIZZLED_WORDS,
    TOP_BITS,
    WORDS,
    here,
)


def _decode_text(twice: bool) -> str:
    """PTX that decodes four words of four e4m3 bytes: operands are named in ``_decode``.

    ``s eeee mmm`` placed as ``s 0000eeee mmm0000`` is the bf16 value times 2**-120, subnormals included. ``prmt``
    spreads each byte over a half word behind eight copies of its sign. ``(byte & 0x7f) + 1`` carries into bit 7 for the
    NaN codes 0x7f and 0xff only.
    """
    lines = [".reg .b32 a, b, c, d, e, f, g, h, n"]
    halves = [("abcdefgh"[2 * place + half], place, half) for place in range(4) for half in (0, 1)]
    for register, place, half in halves:
        lines.append(f"prmt.b32 {register}, ${12 + place}, 0, {('0x9180', '0xB3A2')[half]}")
    lines += [f"shl.b32 {register}, {register}, 4" for register, _, _ in halves]
    lines += [f"and.b32 {register}, {register}, 0x87f087f0" for register, _, _ in halves]
    if twice:
        lines += [f"mul.rn.bf16x2 {register}, {register}, $16" for register, _, _ in halves]
    factor = "$20" if twice else "$16"
    lines += [f"mul.rn.bf16x2 ${4 * half + place}, {register}, {factor}" for register, place, half in halves]
    lines.append("mov.b32 n, $24")
    for place in (0, 2):
        lines += [f"and.b32 a, ${12 + place}, 0x7f7f7f7f", f"and.b32 b, ${13 + place}, 0x7f7f7f7f"]
        lines += ["add.u32 a, a, 0x01010101", "add.u32 b, b, 0x01010101", "or.b32 a, a, b", "or.b32 n, n, a"]
    lines += ["mov.b32 $8, n", "mov.b32 $9, 0", "mov.b32 $10, 0", "mov.b32 $11, 0"]
    return "{ " + "; ".join(lines) + "; }"


DECODE_ONCE = gl.constexpr(_decode_text(twice=False))
DECODE_TWICE = gl.constexpr(_decode_text(twice=True))
DECODE_OPERANDS = gl.constexpr(",".join(["=&r"] * 12 + ["r"] * 16))


@gluon.jit
def _decode(words, first, second, flags, TWICE: gl.constexpr):
    """Four words of four e4m3 bytes, times a scale in two factors -> two words of bf16 pairs for each; flags.

    The second factor is left out unless TWICE: it is 1 for scale bytes up to 134. Bits of NaN codes are added to the
    flags of the first word of four. Their being found here keeps that where the words are: done later, they would
    have to be kept.
    """
    return gl.inline_asm_elementwise(
        DECODE_TWICE if TWICE else DECODE_ONCE,
        DECODE_OPERANDS,
        [words, first, second, flags],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _halves(factors):
    """Two bf16 of a word, each twice."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $2, 0x3232; prmt.b32 $1, $2, $2, 0x1010;", "=&r,=r,r", [factors],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def put(tile, words, COLUMN: gl.constexpr):
    """Words of bf16 pairs into a tile's columns from COLUMN."""
    columns: gl.constexpr = tile.shape[1]
    tile._reinterpret(gl.int32, [BLOCK, columns // 2], SWIZZLED_WORDS).slice(COLUMN // 2, words.shape[1], 1).store(
        words
    )


@gluon.jit
def decoded(words, factors, flags, TWICE: gl.constexpr):
    """Words of e4m3 bytes [keys, n] -> words of bf16 pairs [keys, 2 n], with the factors noted for each key; flags."""
    first, second = _halves(factors)
    first, words = gl.broadcast(gl.expand_dims(first, 1), words)
    second, words = gl.broadcast(gl.expand_dims(second, 1), words)
    low, high, flags = _decode(words, first, second, flags, TWICE)
    return gl.reshape(gl.join(low, high), [words.shape[0], 2 * words.shape[1]]), flags


@gluon.jit
def put_decoded(tile, COLUMN: gl.constexpr, words, factors, flags, TWICE: gl.constexpr):
    """A group of a block into 64 columns of its tile; flags, with its NaN codes'."""
    words, flags = decoded(words, factors, flags, TWICE)
    put(tile, words, COLUMN)
    return flags


@gluon.jit
def words_of(places, AT: gl.constexpr, PIECES: gl.constexpr, WORDS: gl.constexpr):
    """Words of each key from byte AT of it, as many as the layout WORDS has columns.

    L2 takes 256 bytes at a time, so that most groups of a key are there when they are asked for; L1 keeps nothing. AT
    is part of the instruction, so that a key's address serves all of its groups.
    """
    keys: gl.constexpr = WORDS.shape[0]
    columns: gl.constexpr = WORDS.shape[1]
    piece = (gl.arange(0, columns // 4, gl.SliceLayout(0, PIECES)) * 16).to(gl.int64)
    a, b, c, d = gl.inline_asm_elementwise(
        f"ld.global.cg.L2::256B.v4.b32 {{$0, $1, $2, $3}}, [$4 + {AT}];",
        "=r,=r,=r,=r,l",
        [gl.expand_dims(places, 1) + gl.expand_dims(piece, 0)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )
    words = gl.join(gl.join(a, c), gl.join(b, d))  # key, piece; word / 2, word % 2
    return gl.convert_layout(gl.reshape(words, [keys, columns]), WORDS, assert_trivial=True)


@gluon.jit
def poisoned(flags, KEYS: gl.constexpr):
    """Keys that have an e4m3 NaN, from the flags of all their groups."""
    found = gl.reduce_or(gl.reshape(flags, [BLOCK, 4, 4]), 2) & TOP_BITS
    return gl.convert_layout(gl.reduce_or(found, 1), KEYS, assert_trivial=True) != 0


@gluon.jit
def _group_words(places, GROUP: gl.constexpr):
    """The GROUP-th 64 bytes of each key, asked for here and not further down."""
    words = words_of(places, GROUP * 64, PIECES, WORDS)
    here()
    return words


@gluon.jit
def _put_block(x, place, next_places, factors, fill_of, tiles, bias, stage, TWICE: gl.constexpr):
    """A block into its stage; seven groups of it are in ``x``, in whose place come those of the next block."""
    x0, x1, x2, x3, x4, x5, x6 = x
    tile_a, tile_b = tiles[0].index(stage), tiles[1].index(stage)
    tile_c, tile_d = tiles[2].index(stage), tiles[3].index(stage)
    # Groups 0, 4 and 8 first: with each, L2 takes the 256 bytes it is in. Then so that consecutive stores go to
    # different tiles, as two into the same one are kept apart by a barrier.
    flags = gl.full([BLOCK, 16], 0, gl.int32, WORDS)
    flags = put_decoded(tile_a, 0, x0, factors.index(0).load(KEYS), flags, TWICE)
    x7 = _group_words(place, 3)
    flags = put_decoded(tile_c, 0, x1, factors.index(4).load(KEYS), flags, TWICE)
    x8 = _group_words(place, 7)
    fill = fill_of.load(KEYS)
    counts = gl.expand_dims(fill == 0.0, 1)
    put(tile_d, gl.where(counts, x2, 0), 96)
    x0 = _group_words(next_places, 0)
    flags = put_decoded(tile_b, 0, x3, factors.index(2).load(KEYS), flags, TWICE)
    x1 = _group_words(next_places, 4)
    flags = put_decoded(tile_d, 0, x4, factors.index(6).load(KEYS), flags, TWICE)
    x2 = _group_words(next_places, 8)
    flags = put_decoded(tile_a, 64, x5, factors.index(1).load(KEYS), flags, TWICE)
    x3 = _group_words(next_places, 2)
    flags = put_decoded(tile_c, 64, x6, factors.index(5).load(KEYS), flags, TWICE)
    x4 = _group_words(next_places, 6)
    flags = put_decoded(tile_b, 64, x7, factors.index(3).load(KEYS), flags, TWICE)
    x5 = _group_words(next_places, 1)
    bias.store(gl.where((fill == 0.0) & poisoned(flags, KEYS), float("nan"), fill))
    put(tile_d, gl.where(counts, x8, 0), 64)
    x6 = _group_words(next_places, 5)
    return x0, x1, x2, x3, x4, x5, x6


@gluon.jit
def gather(tiles, biases, notes, bars, items):
    """All blocks that are noted, one after the other through two stages of shared memory."""
    full, ready, empty, noted = bars
    places, factors, fills, owners, large = notes
    mbarrier.wait(noted.index(0), 0)
    place = places.index(0).load(PIECE_KEYS)
    owner = gl.max(owners.index(0).load(ONE), 0)
    x = (
        _group_words(place, 0), _group_words(place, 4), _group_words(place, 8), _group_words(place, 2),
        _group_words(place, 6), _group_words(place, 1), _group_words(place, 5),
    )  # fmt: skip
    done = 0
    while owner < items:
        stage = done & 1
        entry = done % NOTED
        after = (done + 1) % NOTED
        mbarrier.wait(noted.index(after), ((done + 1) // NOTED) & 1)
        next_owner = gl.max(owners.index(after).load(ONE), 0)
        next_places = places.index(after).load(PIECE_KEYS)
        noted_factors = factors.index(entry)._reinterpret(gl.int32, [8, BLOCK], PLAIN)
        mbarrier.wait(empty.index(stage), ((done >> 1) & 1) ^ 1)
        if gl.max(large.index(entry).load(ONE), 0) != 0:
            x = _put_block(
                x, place, next_places, noted_factors, fills.index(entry), tiles, biases.index(stage), stage, True
            )
        else:
            x = _put_block(
                x, place, next_places, noted_factors, fills.index(entry), tiles, biases.index(stage), stage, False
            )
        mbarrier.arrive(full.index(stage), count=1)
        place = next_places
        owner = next_owner
        done += 1
