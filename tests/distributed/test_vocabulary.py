"""The layout of a padded vocabulary over ranks, without processes: every id has one row on one rank, and one column."""

from __future__ import annotations

import pytest
import torch

from opmux.distributed import TensorParallel, init_tensor_parallel
from opmux.ops import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from opmux.ops.embedding.vocabulary import Vocabulary


def layouts(base: int, added: int, padding: int, ranks: int) -> list[Vocabulary]:
    return [Vocabulary.of(base + added, base, padding, TensorParallel(ranks, rank)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("base", "added", "padding"), [(49159, 0, 64), (49159, 256, 64), (49159, 256, 512), (3, 2, 64)])
def test_every_id_has_one_row_and_one_column(base: int, added: int, padding: int, ranks: int) -> None:  # case B59
    held = layouts(base, added, padding, ranks)
    ids = torch.arange(-2, base + added + 2)
    inside = (ids >= 0) & (ids < base + added)
    owners = torch.zeros_like(ids)
    columns = torch.full_like(ids, -1)
    for layout in held:
        rows, valid = layout.rows(ids)
        assert int(rows.max()) < layout.local_rows
        owners += valid
        columns = torch.where(valid, layout.rank * layout.local_rows + rows, columns)
    assert torch.equal(owners, inside.long())
    assert torch.equal(columns[inside], held[0].columns())
    assert len(columns[inside].unique()) == base + added
    assert held[0].total_padded == held[0].local_rows * ranks
    assert held[0].total_padded % padding == 0


def test_a_vocabulary_is_padded_to_64() -> None:
    assert Vocabulary.of(49159, None, 64).total_padded == 49216


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_table_is_loaded_plain_with_added_tokens_or_padded(ranks: int) -> None:
    whole = torch.randn(15, 4)  # 10 of the base and 5 added
    for rank in range(ranks):
        with init_tensor_parallel(TensorParallel(ranks, rank)):
            op = VocabParallelEmbedding(15, 4, org_num_embeddings=10, padding_size=4)
        v = op.vocabulary
        padded = torch.full((v.total_padded, 4), float("nan"))
        padded[:10], padded[v.base_padded : v.base_padded + 5] = whole[:10], whole[10:]
        rows, valid = v.rows(torch.arange(15))
        for checkpoint, known in ((whole, 15), (padded, 15), (whole[:10], 10)):
            op.weight.fill_(7.0)
            op.load_weight(checkpoint)
            mine = valid & (torch.arange(15) < known)
            assert torch.equal(op.weight[rows[mine]], whole[mine])
            assert int((op.weight != 0).any(1).sum()) == int(mine.sum())
    with pytest.raises(ValueError, match=r"takes 10 rows \(base\), 15 \(with added tokens\)"):
        op.load_weight(torch.randn(11, 4))


def test_tied_tables_share_memory_or_say_both_layouts() -> None:
    embedding = VocabParallelEmbedding(100, 4)
    assert ParallelLMHead(100, 4).tie_weights(embedding).weight is embedding.weight
    with pytest.raises(ValueError, match=r"total_padded=512.*total_padded=128"):
        ParallelLMHead(100, 4, padding_size=512).tie_weights(embedding)


@pytest.mark.parametrize(("cap", "scale"), [(None, 1.0), (30.0, 0.5)])
def test_padding_never_wins(cap: float | None, scale: float) -> None:  # case B29
    head = ParallelLMHead(3, 2)
    head.load_weight(torch.tensor([[-3.0, 0.0], [-1.0, 0.0], [-2.0, 0.0]]))
    head.weight[3:] = float("nan")
    logits = LogitsProcessor(3, soft_cap=cap, scale=scale)(head, torch.tensor([[1.0, 0.0]]))
    assert logits.shape == (1, 3)
    assert int(logits.argmax()) == 1
    wanted = torch.tensor([[-3.0, -1.0, -2.0]])
    wanted = wanted if cap is None else cap * torch.tanh(wanted / cap)
    torch.testing.assert_close(logits, wanted * scale)


def test_a_bias_is_sharded_like_the_rows() -> None:
    whole = torch.randn(7)
    parts = []
    for rank in range(2):
        with init_tensor_parallel(TensorParallel(2, rank)):
            head = ParallelLMHead(7, 4, bias=True, padding_size=4)
        assert head.bias is not None
        head.load_bias(whole)
        parts.append(head.bias)
    assert torch.equal(torch.cat(parts), torch.cat([whole, torch.zeros(1)]))
    with pytest.raises(ValueError, match="has none"):
        ParallelLMHead(7, 4).load_bias(whole)
