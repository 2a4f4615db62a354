"""Which rung a call of decode gets on an H200. No GPU is asked."""

import pytest

from task5.ladder.by_length import blocks_by_length
from task5.ladder.choice import fastest, is_faster_as_a_chunk
from task5.ladder.kernels import (
    BY_LENGTH,
    EIGHT_WARPS,
    IN_STEP,
    KEYS_AS_ROWS,
    MORE_ROWS,
    MORE_ROWS_BY_LENGTH,
    Choice,
)


def test_rung_7_reads_long_caches_in_order(h200):
    def rung(heads, kv_len, invariant=False, page_size=None, **shape):
        given = dict(batch_invariant=invariant, page_size=page_size)
        return fastest(h200(**{"dtype": 2} | shape), heads, kv_len, **given).rung

    assert rung(128, 8192) == rung(8, 131072) == rung(128, 8192, True) == IN_STEP
    assert rung(128, 8192, head_dim=64) == IN_STEP
    assert rung(96, 16384) == 4  # on too few SMs
    assert rung(128, 8192, page_size=64) == rung(128, 4096) == rung(256, 8192) == 4
    assert rung(128, 4096, head_dim=64) == 4
    assert rung(128, 8192, rows=9) == rung(128, 8192, head_dim=256) == 4
    assert rung(128, 4096, dtype=0) == IN_STEP and rung(128, 4096, True, dtype=0) == 4


HALF, AHEAD = {"every_other_sm": True}, {"ahead": True}


@pytest.mark.parametrize(
    ("heads", "kv_len", "shape", "rung", "how"),
    [
        (8, 1024, {}, 4, HALF | AHEAD),
        (8, 1024, {"head_dim": 64}, 4, HALF | AHEAD),
        (8, 2048, {}, 4, HALF | AHEAD),
        (8, 3000, {}, 4, AHEAD),
        (8, 4096, {}, 4, AHEAD),
        (8, 8192, {}, 4, HALF),
        (8, 16384, {"head_dim": 64}, 4, HALF),
        (8, 65536, {}, EIGHT_WARPS, AHEAD),  # several clusters of each pair
        (8, 65536, {"head_dim": 64}, EIGHT_WARPS, AHEAD),
        (3, 20000, {}, 4, {}),
        (4, 16384, {}, EIGHT_WARPS, AHEAD),
        (12, 16384, {}, 4, {}),
        (14, 16384, {}, 4, {}),
        (32, 16384, {}, EIGHT_WARPS, AHEAD),
        (2, 65536, {"head_dim": 256}, 4, AHEAD),
        (4, 8192, {}, EIGHT_WARPS, AHEAD),  # of the SMs half would have none
        (4, 2048, {}, 4, AHEAD),
        (7, 8192, {}, EIGHT_WARPS, HALF),
        (16, 1024, {}, 4, AHEAD),
        (16, 8192, {}, EIGHT_WARPS, AHEAD),
        (32, 256, {}, 4, AHEAD),
        (32, 512, {}, EIGHT_WARPS, AHEAD),
        (4, 4096, {}, 4, AHEAD),
        (48, 1024, {"head_dim": 64}, 4, AHEAD),
        (32, 1024, {}, EIGHT_WARPS, AHEAD),
        (32, 2048, {}, EIGHT_WARPS, {}),  # clusters of four fill the SMs
        (28, 2048, {}, EIGHT_WARPS, AHEAD),
        (12, 1024, {"head_dim": 64}, 4, AHEAD),
        (24, 1024, {}, 4, AHEAD),
        (24, 2048, {}, EIGHT_WARPS, AHEAD),
        (24, 4096, {}, 4, {}),  # as on 96 SMs
        (48, 4096, {}, 4, {}),
        (96, 1024, {}, 4, {}),
        (1, 8192, {}, EIGHT_WARPS, AHEAD),
        (1, 65536, {}, EIGHT_WARPS, AHEAD),
        (64, 256, {}, 4, AHEAD),
        (64, 1024, {}, EIGHT_WARPS, AHEAD),
        (64, 4096, {}, EIGHT_WARPS, AHEAD),
        (128, 1024, {}, EIGHT_WARPS, AHEAD),
        (96, 1024, {"head_dim": 64}, EIGHT_WARPS, AHEAD),
        (128, 8192, {}, IN_STEP, AHEAD),
        (128, 8192, {"rows": 9}, EIGHT_WARPS, AHEAD),
        (256, 1024, {}, 4, AHEAD),  # two blocks on almost each SM
        (384, 1024, {}, 3, AHEAD),  # three
        (192, 2048, {}, 3, AHEAD),
        (288, 2048, {}, EIGHT_WARPS, AHEAD),
        (384, 2048, {}, 3, AHEAD),
        (256, 8192, {}, 4, AHEAD),
        (768, 1024, {"head_dim": 64}, KEYS_AS_ROWS, AHEAD),
        (768, 2048, {"head_dim": 64}, 4, AHEAD),
        (8, 4096, {"rows": 32}, EIGHT_WARPS, {}),  # as two pairs each
        (4, 4096, {"rows": 32}, EIGHT_WARPS, AHEAD),
        (4, 32768, {"rows": 32}, 4, {}),
        (4, 65536, {"rows": 32}, MORE_ROWS, AHEAD),
        (8, 8192, {"rows": 32}, EIGHT_WARPS, {}),
        (8, 9999, {"rows": 32}, MORE_ROWS, AHEAD),
        (24, 8192, {"rows": 32}, MORE_ROWS, {}),  # on 96 SMs
        (2, 99_999, {"rows": 32}, 4, {}),
        (32, 8192, {"rows": 32, "head_dim": 64}, EIGHT_WARPS, {}),
        (32, 16384, {"rows": 32, "head_dim": 64}, MORE_ROWS, {}),
        (132, 4096, {"rows": 17}, MORE_ROWS, AHEAD),
        (8, 1024, {"rows": 32}, 4, AHEAD),
        (1, 32768, {"rows": 32}, 4, {}),
        (67, 512, {"rows": 32}, 4, {}),
        (67, 1100, {"rows": 32}, MORE_ROWS, {}),
        (133, 4096, {"rows": 32}, KEYS_AS_ROWS, {}),
        (8, 3512, {"rows": 33}, MORE_ROWS, AHEAD),
        (8, 3512, {"rows": 99, "head_dim": 64}, MORE_ROWS, {}),
        (8, 512, {"rows": 33}, 4, AHEAD),
        (8, 512, {"rows": 99, "head_dim": 64}, 4, AHEAD),
        (133, 4096, {"rows": 64}, KEYS_AS_ROWS, {}),  # one read for all rows
        (133, 4096, {"rows": 48}, MORE_ROWS, AHEAD),
        (133, 4096, {"rows": 65}, MORE_ROWS, AHEAD),
        (384, 1024, {"head_dim": 64}, 3, AHEAD),
        (320, 1024, {"head_dim": 64}, EIGHT_WARPS, AHEAD),  # a fifth of the third blocks is missing
        (8, 2048, {"head_dim": 256}, 4, AHEAD),
        (32, 1024, {"head_dim": 256}, 4, {}),  # clusters of four fill the SMs
        (64, 1024, {"head_dim": 256}, 4, AHEAD),
        (32, 8192, {"head_dim": 256}, 4, {}),
        (133, 8192, {"head_dim": 256}, 4, {}),
        (8, 4096, {"head_dim": 256, "rows": 32}, KEYS_AS_ROWS, {}),
    ],
)
def test_the_rung_of_16_bits(h200, heads, kv_len, shape, rung, how):
    call = h200(**{"dtype": 2} | shape)
    assert fastest(call, heads, kv_len, promised=True) == Choice(rung, **how)
    assert not fastest(call, heads, kv_len).ahead


@pytest.mark.parametrize(
    ("heads", "kv_len", "shape", "how"),
    [
        (8, 4096, {}, Choice(4, every_other_sm=True)),
        (24, 1024, {}, Choice(4)),
        (24, 8192, {}, Choice(4)),
        (16, 1024, {}, Choice(4, every_other_sm=True)),
        (32, 8192, {}, Choice(EIGHT_WARPS)),
        (64, 2048, {}, Choice(4)),
        (64, 8192, {}, Choice(4)),
        (128, 4096, {}, Choice(4)),
    ],
)
def test_the_rung_without_a_promise(h200, heads, kv_len, shape, how):
    assert fastest(h200(dtype=2, **shape), heads, kv_len) == how


def test_the_rungs_of_pages(h200):
    def how(heads, kv_len, page_size, **shape):
        call = h200(dtype=2, **shape)
        return fastest(call, heads, kv_len, page_size=page_size, promised=True)

    assert how(1, 65536, 48) == Choice(EIGHT_WARPS, ahead=True)
    assert how(8, 4096, 64) == Choice(4, every_other_sm=True)
    assert how(16, 2048, 64) == Choice(4, ahead=True)
    assert how(32, 1024, 64) == Choice(EIGHT_WARPS, ahead=True)
    assert how(7, 8192, 64) == how(24, 2048, 64) == how(96, 1024, 64) == Choice(4)
    assert how(96, 4096, 64) == Choice(4, ahead=True)
    assert how(16, 8192, 64) == Choice(4, every_other_sm=True)
    assert how(64, 8192, 64) == Choice(EIGHT_WARPS, ahead=True)


def test_the_rungs_of_many_pairs_batch_invariant(h200):
    kv_lens = (1024, 2048, 4096, 8192, 16384)

    def rungs(heads, page_size=None, **shape):
        given = dict(batch_invariant=True, page_size=page_size, promised=True)
        return [fastest(h200(dtype=2, **shape), heads, n, **given).rung for n in kv_lens]

    assert rungs(512) == [4, 4, *[IN_STEP] * 3] and rungs(384) == [EIGHT_WARPS] * 5
    assert rungs(192) == rungs(384, head_dim=64) == [3] * 5
    assert rungs(512, head_dim=64) == rungs(512, 64) == rungs(512, 64, head_dim=64) == [4] * 5
    assert rungs(8, rows=32) == [4, *[EIGHT_WARPS] * 3, 4]
    assert rungs(1) == rungs(2) == [4, 4, EIGHT_WARPS, 4, 4]  # more leaves than 16 blocks of four
    assert rungs(4) == [4] * 5


def test_one_or_two_blocks_of_each_pair_on_most_sms(h200):
    """Four warps, with keys ahead, up to more keys than elsewhere; and in pages without, up to twice as many."""

    def how(heads, kv_len, page_size=None, **options):
        given = dict(page_size=page_size, promised=True) | options
        return fastest(h200(dtype=2), heads, kv_len, **given)

    four, eight = Choice(4, ahead=True), Choice(EIGHT_WARPS, ahead=True)
    assert how(64, 600) == how(128, 300) == how(64, 700, 64) == how(60, 640) == four
    assert how(64, 640) == how(128, 320) == how(64, 1200, 64) == eight
    assert how(64, 1100, 64) == how(128, 400, 64) == Choice(4)
    invariant = dict(batch_invariant=True, batch=8)
    assert how(64, 600, **invariant) == how(64, 600, 64, **invariant) == four
    assert how(64, 640, **invariant) == how(64, 640, 64, **invariant) == eight


def test_blocks_on_some_sms(h200):
    """Four warps, with keys ahead, then without, then eight with keys ahead; in pages keys ahead end later."""

    def how(heads, kv_len, page_size=None):
        return fastest(h200(dtype=2), heads, kv_len, page_size=page_size, promised=True)

    four, eight = Choice(4, ahead=True), Choice(EIGHT_WARPS, ahead=True)
    for heads in (12, 24, 40, 48, 96):
        choices = [how(heads, keys // heads) for keys in (26_000, 30_000, 42_000, 45_000, 60_000)]
        assert choices == [four, Choice(4), Choice(4), eight, Choice(4)]
        assert how(heads, 30_000 // heads, 64) == four


def test_several_leaves_of_a_warp_in_pages(h200):
    """Eight warps, with keys ahead: while one of a scheduler's merges, the other computes."""

    def how(heads, kv_len, batch, page_size=64, **shape):
        given = dict(batch_invariant=True, promised=True, page_size=page_size, batch=batch)
        return fastest(h200(dtype=2, **shape), heads, kv_len, **given)

    eight = Choice(EIGHT_WARPS, ahead=True)
    assert how(24, 3000, 3) == how(96, 500, 12) == how(32, 400, 4) == eight
    assert how(12, 850, 3) == how(8, 1800, 4) == Choice(4, ahead=True)  # one of a warp
    assert how(96, 1600, 12) == eight and how(24, 5000, 3) == Choice(4)  # eight of a warp, and two
    assert how(24, 1000, 3) == how(16, 2048, 2) == how(16, 4096, 4) == Choice(4, ahead=True)
    assert how(8, 4096, 1) == Choice(4, every_other_sm=True)


def test_eight_pairs_of_several_sequences_batch_invariant(h200):
    """They have more leaves than four warps on every other SM have warps: eight warps, on all SMs."""

    def how(kv_len, batch=2, page_size=None, promised=True, **shape):
        given = dict(batch_invariant=True, batch=batch, page_size=page_size, promised=promised)
        return fastest(h200(dtype=2, **shape), 8, kv_len, **given)

    on_all_sms, on_half = Choice(EIGHT_WARPS, ahead=True), Choice(4, every_other_sm=True)
    assert how(4096) == how(12_000, batch=8) == how(4096, rows=16) == on_all_sms
    assert how(8192, head_dim=64) == on_all_sms and how(4096, head_dim=64) == Choice(4, ahead=True)
    assert how(1024, head_dim=64) == Choice(4, True, True)
    assert how(4096, batch=1) == how(4096, batch=1, page_size=64) == on_half
    assert how(4096, page_size=64) == how(3000, page_size=64) == on_all_sms
    assert how(3000) == Choice(4, ahead=True)  # more than warps of every other SM, one for each
    assert how(8192, promised=False) == on_half


def test_pairs_of_9_to_16_rows(h200):
    """Several leaves of a warp take four warps longer; and with pages there is more to compute than half of SMs can."""

    def how(heads, kv_len, batch=1, page_size=None, rows=16, lengths=1, invariant=True, **shape):
        given = dict(batch=batch, page_size=page_size, lengths=lengths, batch_invariant=invariant)
        return fastest(h200(dtype=2, rows=rows, **shape), heads, kv_len, promised=True, **given)

    eight, deep, of_eight_warps = Choice(EIGHT_WARPS), BY_LENGTH[0], BY_LENGTH[2]
    ahead = Choice(EIGHT_WARPS, ahead=True)
    assert how(8, 65536) == eight and how(8, 60_000) == how(2, 40_000) == Choice(4)
    assert how(8, 20_000, batch=8) == how(2, 131_072) == how(2, 262_144) == ahead
    assert how(8, 65536, rows=8) == how(8, 65536, head_dim=64) == Choice(4)
    assert how(1, 524_288, rows=8) == how(1, 1 << 20, head_dim=64) == ahead
    assert how(4, 8192).rung == how(1, 3000, rows=1).rung == 4  # no more leaves than its warps
    assert how(1, 4096, rows=1) == ahead
    assert how(64, 8192, lengths=8).rung == of_eight_warps
    assert how(32, 16384, lengths=8).rung == how(64, 8192, lengths=8, rows=8).rung == deep

    def paged(heads, kv_len, **given):
        return how(heads, kv_len, page_size=64, **given)

    half = Choice(4, every_other_sm=True)
    assert paged(16, 4096, invariant=False) == paged(8, 4096, invariant=False) == ahead
    assert paged(8, 4096) == half and paged(16, 4096) == paged(96, 1024, batch=12) == ahead
    assert paged(16, 4096, rows=8, invariant=False) == half
    assert paged(8, 2048, invariant=False).rung == 4


def test_lengths_that_may_differ_decide(h200):
    """From 125 to 400 MB of room on, as much as equal lengths lose and others gain."""

    def rung(heads, kv_len, lengths, **shape):
        return fastest(h200(**{"dtype": 2} | shape), heads, kv_len, lengths=lengths).rung

    deep, shallow, of_eight_warps, _ = BY_LENGTH
    assert rung(128, 8192, 16) == rung(104, 16384, 13) == deep
    assert rung(256, 4096, 32, head_dim=256) == rung(64, 5000, 8, head_dim=256) == deep
    assert rung(120, 8192, 15, dtype=0) == deep
    assert rung(120, 8192, 15, dtype=0, rows=5) == of_eight_warps
    assert rung(144, 8192, 18) == rung(512, 4096, 64) == rung(192, 4096, 24, dtype=0) == deep
    assert rung(160, 8192, 20) == rung(208, 8192, 26) == rung(140, 3000, 20) == deep
    assert rung(256, 4096, 32) == rung(256, 4096, 128) == rung(224, 8192, 28) == deep
    assert rung(160, 2048, 20) == rung(140, 2500, 20) == shallow
    assert rung(128, 3500, 16) == rung(300, 4096, 30) == of_eight_warps
    many = dict(rows=9)  # 200 MB of them are few
    assert rung(144, 8192, 18, **many) == deep and rung(208, 8192, 26, **many) == shallow
    assert rung(256, 4096, 32, **many) == of_eight_warps
    few = rung(256, 1800, 32), rung(2, 999_999, 2), rung(140, 2000, 20)
    few += (
        rung(7, 10_000, 7, dtype=0, head_dim=256),
        rung(7, 99_999, 7, dtype=0, head_dim=256, rows=8),
    )
    assert not {rung(256, 4096, 1), rung(1032, 4096, 129), *few} & set(BY_LENGTH)
    assert rung(64, 8192, 8, rows=33) == rung(8, 32768, 8, rows=32) == MORE_ROWS_BY_LENGTH
    assert rung(64, 8192, 1, rows=33) == rung(8, 16384, 8, rows=32) == MORE_ROWS
    assert rung(67, 8192, 67, rows=33) == MORE_ROWS  # more pairs than SMs
    assert rung(256, 4096, 32, rows=33, head_dim=256) == KEYS_AS_ROWS

    def paged(heads, kv_len, **shape):
        return fastest(h200(**{"dtype": 2} | shape), heads, kv_len, page_size=64, lengths=8).rung

    assert paged(64, 8192) == paged(16, 32768) == of_eight_warps  # on almost all SMs
    assert paged(128, 3500) == of_eight_warps and paged(140, 8192) == paged(200, 4096) == shallow
    assert paged(20, 16_000, head_dim=256) == paged(128, 8192) == paged(224, 4096) == deep


def test_keys_ahead_by_length(h200):
    def ahead(pairs, mb, page_size=None, **shape):
        call = h200(**{"dtype": 2} | shape)
        kv_len = mb * 10**6 // (2 * pairs * call.head_dim * call.item_size)
        options = dict(promised=True, page_size=page_size, lengths=8)
        choice = fastest(call, pairs, kv_len, **options)
        assert choice.rung in BY_LENGTH
        return choice.ahead

    assert ahead(128, 220) and ahead(128, 300) and ahead(160, 160) and ahead(256, 300)
    assert not ahead(104, 300) and ahead(104, 500) and ahead(104, 300, 64) and ahead(160, 300, 64)
    assert not ahead(144, 300) and not ahead(208, 300) and not ahead(512, 500)
    assert not ahead(128, 300, rows=9) and not ahead(144, 500, rows=9) and ahead(208, 300, rows=9)


def test_from_how_many_bytes_on_lengths_decide(h200):
    def least(pairs, **given):
        page_size, shape = given.pop("page_size", None), {"dtype": 2} | given
        invariant = shape.pop("batch_invariant", False)
        call = h200(**shape)

        def by_length(mb):
            kv_len = mb * 10**6 // (2 * pairs * call.head_dim * call.item_size)
            options = dict(batch_invariant=invariant, page_size=page_size, lengths=8)
            return fastest(call, pairs, kv_len, **options).rung in BY_LENGTH

        limits = [
            mb for mb in (125, 150, 200, 250, 300, 400) if by_length(mb + 1) > by_length(mb - 1)
        ]
        return limits[0] if len(limits) == 1 else limits

    wide, float32, paged = dict(head_dim=256), dict(dtype=0), dict(page_size=64)
    assert {least(n) for n in (9, 12, 14, 24, 32, 48, 62, 67, 91, 92, 117)} == {125}
    assert {least(n) for n in (133, 154, 155, 160, 211)} == {150}
    assert {least(n) for n in (16, 63, 64, 66, 118, 128, 132)} == {200}
    assert {least(n) for n in (4, 8, 212, 256, 264)} == {250}
    assert {least(n) for n in (265, 400)} == {400}
    assert {least(n, rows=9) for n in (9, 16, 24, 48, 72, 100)} == {200}
    assert least(128, rows=9) == 250 and least(160, rows=9) == 150
    assert {least(n, rows=9) for n in (133, 154, 212, 256)} == {400}
    assert {least(n, **wide) for n in (9, 24, 32, 48, 67, 81, 82, 117)} == {125}
    assert {least(n, **wide) for n in (16, 64, 118, 132)} == {200}
    assert least(160, **wide) == 150 and least(256, **wide) == 400
    assert least(4, **wide) == least(8, **wide) == least(24, rows=9, **wide) == 300
    assert {least(n, **float32) for n in (9, 10, 16, 64, 67, 128, 140, 160, 256)} == {125}
    assert least(4, **float32) == 300 and least(5, **float32) == 125  # 26 blocks of a pair, not 16
    assert least(300, **float32) == 400
    assert {least(n, **paged) for n in (9, 24, 64, 67, 91, 92, 117, 128, 140, 160)} == {200}
    assert {least(n, **paged) for n in (4, 8, 212, 256)} == {250} and least(300, **paged) == 400
    assert {least(n, **paged, rows=9) for n in (92, 128, 160, 256)} == {400}
    assert least(72, **paged, **wide) == 200 and least(100, **paged, **wide) == 400
    given = dict(batch_invariant=True)
    assert {least(n, **given) for n in (9, 24, 48, 64, 67, 128)} == {250}
    assert least(24, **given, **wide) == least(24, **given, **float32) == 300
    assert least(128, **given, **wide) == least(256, **given) == 400


def test_few_pairs_by_length(h200):
    """Rung 10 where they fill the SMs, and without a promise where some are left over; else rung 8, ahead."""

    def how(pairs, promised=True, **shape):
        call = h200(**{"dtype": 2} | shape)
        kv_len = 10**9 // (2 * pairs * call.head_dim * call.item_size)
        return fastest(call, pairs, kv_len, promised=promised, lengths=pairs)

    deep, _, of_eight_warps, _ = BY_LENGTH
    for pairs in (3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 16, 18, 22, 32, 33, 64):
        assert how(pairs) == Choice(of_eight_warps, ahead=True)
        assert how(pairs, promised=False) == Choice(of_eight_warps)
    for pairs in (15, 20, 24, 28, 36, 40, 48, 54, 60):
        assert how(pairs) == Choice(deep, ahead=True)
        few = pairs in (24, 36, 40, 48)  # on many SMs that are left over
        assert how(pairs, promised=False) == Choice(deep if few else of_eight_warps)
    assert how(20, dtype=0) == how(48, dtype=0) == Choice(of_eight_warps, ahead=True)
    assert how(12, head_dim=256) == how(20, head_dim=256) == Choice(deep)
    for pairs, blocks in ((5, (2, 26)), (12, (1, 11)), (18, (1, 7)), (24, (2, 4)), (64, (2, 2))):
        assert blocks_by_length(h200(dtype=2), pairs) == blocks
    assert blocks_by_length(h200(dtype=2, head_dim=256), 24) == (1, 5)
    assert blocks_by_length(h200(dtype=2, head_dim=256, rows=9), 24) == (2, 4)
    assert blocks_by_length(h200(dtype=0), 36) == (1, 3)


def test_somewhat_more_pairs_than_half_of_the_sms_by_length(h200):
    """Rung 8, with keys ahead but for clusters of two and head_dim 256; in float32 of many rows rung 10."""

    def how(pairs, mb=450, **shape):
        call = h200(**{"dtype": 2} | shape)
        kv_len = mb * 10**6 // (2 * pairs * call.head_dim * call.item_size)
        return fastest(call, pairs, kv_len, promised=True, lengths=pairs)

    deep, _, of_eight_warps, _ = BY_LENGTH
    assert how(67) == how(76) == how(72, head_dim=64) == Choice(deep)
    assert how(77) == how(100) == how(72, mb=300) == Choice(deep, ahead=True)
    wide = dict(head_dim=256)
    assert how(72, **wide) == how(72, mb=260, **wide) == how(100, **wide) == Choice(deep)
    assert how(67, dtype=0) == how(128, mb=130, dtype=0) == Choice(deep, ahead=True)
    assert how(67, dtype=0, rows=5) == how(128, dtype=0, rows=5) == Choice(of_eight_warps)


def test_pairs_of_16_of_many_rows(h200):
    """Where keys are few, or batch-invariant ones are 17 to 32."""

    def rung(heads, kv_len, rows, **options):
        return fastest(h200(dtype=2, rows=rows), heads, kv_len, **options).rung

    assert rung(8, 500, 64) == 4 and rung(8, 1500, 64) == EIGHT_WARPS
    assert rung(60, 200, 64) == 4  # more pairs than SMs
    assert rung(8, 2500, 64) == rung(8, 500, 64, batch_invariant=True) == MORE_ROWS


def test_many_rows_are_faster_as_a_chunk(h200):
    def chunk(heads, kv_len, rows, lengths=1, page_size=None, batch_invariant=False, **shape):
        call = h200(**{"dtype": 2, "rows": rows} | shape)
        given = dict(lengths=lengths, page_size=page_size, batch_invariant=batch_invariant)
        return is_faster_as_a_chunk(call, heads, kv_len, **given)

    assert chunk(1, 26_667, 33) and chunk(99, 99_999, 128, lengths=3)
    assert not chunk(1, 26_666, 33) and not chunk(2, 14_000, 64, head_dim=64, page_size=16)
    assert chunk(90, 100, 33) and not chunk(88, 100, 33)  # more pairs than two for each SM
    assert chunk(1, 20_000, 64, page_size=16) and not chunk(1, 19_999, 64, page_size=16)
    assert chunk(1, 26_667, 48, page_size=64)
    assert not chunk(8, 8192, 32, page_size=16) and not chunk(8, 8192, 32, page_size=96)
    assert chunk(8, 4096, 32) and not chunk(8, 3600, 32)  # 17 and 14.7 MB
    assert chunk(8, 8192, 32, page_size=64) and not chunk(8, 4096, 32, page_size=64)
    assert chunk(8, 16384, 17, lengths=8) and chunk(8, 32768, 17, lengths=8)
    for heads in (33, 34, 56, 62, 67, 96, 125):  # 102 MB
        assert chunk(heads, 200_000 // heads, 17, lengths=heads)
    for heads in (63, 64, 66, 126, 128, 132, 160):
        assert not chunk(heads, 280_000 // heads, 17, lengths=8)  # 143 MB
    assert chunk(264, 1200, 17, lengths=33) and not chunk(264, 1000, 17, lengths=33)  # 162, 135 MB
    assert not chunk(600, 1000, 17, lengths=75) and chunk(600, 1000, 17, lengths=129)
    assert not chunk(8, 99_999, 16)
    for heads, kv_len in ((1, 300), (8, 99_999)):  # rows alone decide
        assert chunk(heads, kv_len, 17, batch_invariant=True)
        assert not chunk(heads, kv_len, 16, batch_invariant=True)
    assert not chunk(8, 8192, 64, dtype=0) and not chunk(8, 8192, 64, head_dim=256)
    assert not is_faster_as_a_chunk(h200(dtype=2, rows=64)._replace(hopper=False), 8, 8192)


def test_equal_lengths_have_any_number_of_blocks(h200):
    """Where these are more than 1.25 x a power of two, as of 6, 9, 10 or 12 kv heads; not of 7, 8, 14 or 15."""

    def rung(heads, megabytes, batch=1, lengths=1, **shape):
        call = h200(**{"dtype": 2} | shape)
        kv_len = int(megabytes * 1e6) // (2 * heads * call.head_dim * call.item_size)
        return fastest(call, heads, kv_len, batch=batch, lengths=lengths).rung

    for heads in (3, 5, 6, 9, 10, 11, 12, 18, 20, 22):
        wide = rung(heads, 150, head_dim=256)
        assert {wide, rung(heads, 150, dtype=0)} <= set(BY_LENGTH)
        assert (rung(heads, 300) in BY_LENGTH) == (heads <= 12)
        assert rung(heads, 200) not in BY_LENGTH
    for heads in (1, 2, 4, 7, 8, 14, 15, 16, 32, 48):
        few = rung(heads, 900), rung(heads, 900, dtype=0), rung(heads, 900, head_dim=256)
        assert not set(few) & set(BY_LENGTH)
    assert rung(10, 900, batch=129) not in BY_LENGTH


def test_float32_of_more_than_four_rows(h200):
    """Four warps compute too long; with few pairs of head_dim 64 they do not."""

    def rung(heads, kv_len, rows, **options):
        shape = {"head_dim": options.pop("head_dim", 128)}
        return fastest(h200(dtype=0, rows=rows, **shape), heads, kv_len, **options).rung

    assert rung(8, 32768, 5) == rung(1, 99_999, 16) == rung(32, 4096, 8) == EIGHT_WARPS
    assert rung(8, 65536, 8, head_dim=64) == EIGHT_WARPS
    assert rung(8, 32768, 4) == rung(2, 299_999, 8, head_dim=64) == 4
    assert rung(8, 32768, 8, batch_invariant=True) == EIGHT_WARPS  # more leaves than warps of four
    assert rung(8, 8192, 8, batch_invariant=True) == 4
