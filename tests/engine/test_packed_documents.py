"""Microbatches that are no rows, as docs/howto/packing.md writes them: the gradients of one process, to the bit."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import toy
from reference import OneProcess, assert_as_one_process, gradients
from runners import on_ranks
from torch import Tensor, nn

import penstock as ps

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "packing.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def page() -> dict[str, Any]:
    """What the page defines."""
    names: dict[str, Any] = {"__name__": "packing"}
    for block in CODE:
        exec(compile(block, "packing.md", "exec"), names)
    return names


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return page()[kind]().double()


def texts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(30, (length,), generator=generator) for length in lengths]


ROWS = [texts(5, 11), texts(16), texts(1, 2, 13), texts(9, 7)]
VARLEN = [texts(5, 11), texts(3), texts(4, 4, 4, 4)]


def images(with_images: bool) -> tuple[list[tuple[Tensor, Tensor | None]], list[Tensor]]:
    """Four microbatches of two rows, of which the first and third have images: three, and one."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(30, (2, 4, 2, 8), generator=generator)
    microbatches: list[tuple[Tensor, Tensor | None]] = [(rows, None) for rows in tokens]
    if with_images:
        tokens[0, 0, 2] = tokens[0, 1, 0] = tokens[0, 1, 7] = tokens[2, 1, 4] = 31
        for index, count in ((0, 3), (2, 1)):
            pixels = torch.randn(count, 3, 4, 4, generator=generator, dtype=torch.float64)
            microbatches[index] = tokens[index], pixels
    return microbatches, list(targets)


def ranks(_: Any = None) -> dict[str, Any]:
    """Loss and gradients of each of the page's steps."""
    names, found = page(), {}
    for name, pipe, loss in (
        ("packed", *names["step_of_packed_rows"](model("PackedModel"), ROWS)),
        ("varlen", *names["step_of_varlen"](model("VarlenModel"), VARLEN)),
        ("images", *names["step_with_images"](model("SeeingModel"), *images(True))),
        ("no images", *names["step_with_images"](model("SeeingModel"), *images(False))),
    ):
        found[name] = loss.item(), gradients(pipe.named_parameters())
    return found


def one_process(kind: str, calls: list[tuple[Any, ...]], targets: list[Tensor]) -> tuple[float, dict[str, Tensor | None]]:
    pipe = OneProcess(model(kind), page()["token_loss"], loss_weight=ps.tokens())
    return pipe.step_microbatches(calls, targets).item(), gradients(pipe.named_parameters())


def expected() -> dict[str, tuple[float, dict[str, Tensor | None]]]:
    names = page()
    *inputs, target = names["pack"](ROWS)
    packed = [tuple(tensor[start : start + 2] for tensor in inputs) for start in (0, 2)]
    lines = [tuple(tensor[0] for tensor in names["pack"]([group])) for group in VARLEN]
    offsets = [torch.tensor([0, *map(len, group)]).cumsum(0).int() for group in VARLEN]
    varlen = [(tokens, offset, places) for (tokens, _, places, _), offset in zip(lines, offsets, strict=True)]
    return {
        "packed": one_process("PackedModel", packed, [target[:2], target[2:]]),
        "varlen": one_process("VarlenModel", varlen, [line[3] for line in lines]),
        "images": one_process("SeeingModel", *images(True)),
        "no images": one_process("SeeingModel", *images(False)),
    }


@pytest.mark.ranks
def test_packed_rows_offsets_and_images_in_some_microbatches_have_the_gradients_of_one_process() -> None:
    everyone = on_ranks(ranks, 2)
    assert_as_one_process(everyone, expected())
    tower = {name: grad for found in everyone for name, grad in found["no images"][1].items() if "tower" in name}
    assert len(tower) == 2
    assert set(tower.values()) == {None}


def test_documents_of_a_row_do_not_see_each_other() -> None:
    """So a packed row has the outputs of its documents alone."""
    names, whole = page(), model("PackedModel")
    tokens, documents, places, _ = names["pack"](ROWS)
    outputs = whole(tokens, documents, places)
    for row, row_texts in enumerate(ROWS):
        alone = [whole(*(tensor for tensor in names["pack"]([[text]])[:3]))[0] for text in row_texts]
        torch.testing.assert_close(outputs[row], torch.cat(alone))


def outputs_with_flex_attention() -> bool | None:
    """Whether the last rank has the outputs of one process."""
    names = page()
    torch.manual_seed(0)
    stages = [names["FlexStage"](), names["LastFlexStage"]()]
    x, documents = torch.randn(4, 16, 16), names["pack"](ROWS)[1]
    ours = names["outputs_of_flex_stages"](copy.deepcopy(stages), x, documents)
    with torch.no_grad():
        theirs = torch.cat([stages[1](*stages[0](x[half], documents[half])) for half in (slice(2), slice(2, 4))])
    return None if ours is None else torch.equal(ours, theirs)


def send_a_block_mask() -> str:
    mask = page()["create_block_mask"](lambda row, head, query, key: query >= key, None, None, 16, 16, device="cpu")
    stages = [toy(lambda self, x, mask=None: self.layer(x), layer=nn.Linear(16, 16)) for _ in range(2)]
    pipe = ps.Pipeline(stages, nn.functional.mse_loss, microbatches=2)
    with pytest.raises(ps.MismatchError) as error:
        pipe.step(torch.randn(4, 16, 16), mask=mask, target=torch.randn(4, 16, 16))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_block_mask_is_made_in_each_stage_and_refused_as_a_message() -> None:
    assert on_ranks(outputs_with_flex_attention, 2) == [None, True]
    assert all("an object of class BlockMask cannot be sent" in text for text in on_ranks(send_a_block_mask, 2))
