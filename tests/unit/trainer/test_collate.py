"""Right-padded batches and packed rows line up token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.data.collate import collate, pack_tokens
from trainer.data.corpus import Sample
from trainer.errors import DataError


def sample(*ids: int, prompt: int = 1) -> Sample:
    mask = np.arange(len(ids)) >= prompt
    return Sample(np.asarray(ids, dtype=np.int32), mask, None)


def test_batch_is_padded_on_the_right():
    batch = collate([sample(5, 6, 7), sample(8)], pad_id=9)

    assert batch.input_ids_BS.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.attention_mask_BS.tolist() == [[True, True, True], [True, False, False]]
    assert batch.input_ids_BS.dtype == torch.int64
    assert batch.padding_ratio == pytest.approx(1 / 3)


def test_gathering_the_valid_rows_gives_the_packed_tokens():
    batch = collate([sample(5, 6, 7), sample(8), sample(3, 4)], pad_id=0)

    assert torch.equal(batch.input_ids_BS.flatten()[batch.valid_rows_T], batch.tokens.input_ids_T)


def test_packed_row_restarts_positions_and_numbers_documents():
    tokens = pack_tokens([sample(5, 6, 7), sample(8, 9, prompt=0)])

    assert tokens.input_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert tokens.position_T.tolist() == [0, 1, 2, 0, 1]
    assert tokens.doc_id_T.tolist() == [0, 0, 0, 1, 1]
    assert tokens.loss_mask_T.tolist() == [False, True, True, True, True]
    dtypes = [
        tokens.input_ids_T.dtype,
        tokens.position_T.dtype,
        tokens.doc_id_T.dtype,
        tokens.loss_mask_T.dtype,
    ]
    assert dtypes == [torch.int64, torch.int64, torch.int32, torch.bool]


def test_width_can_be_fixed():
    batch = collate([sample(5, 6)], pad_id=0, pad_to=4)

    assert batch.input_ids_BS.tolist() == [[5, 6, 0, 0]]
    assert batch.valid_rows_T.tolist() == [0, 1]


def test_a_sample_wider_than_the_fixed_width_is_refused():
    with pytest.raises(DataError, match="sample of 3 tokens does not fit a batch padded to 2"):
        collate([sample(1, 2, 3)], pad_id=0, pad_to=2)


@pytest.mark.parametrize("samples", [[], [sample()]], ids=["none", "empty"])
def test_a_batch_without_tokens_is_refused(samples):
    with pytest.raises(DataError, match="a batch needs non-empty samples"):
        collate(samples, pad_id=0)
