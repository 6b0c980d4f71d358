"""A tensor from one rank to another: what is no message of `send_tensor` is refused."""

import pytest
import torch

import penstock as ps
from penstock.comms import point_to_point
from penstock.comms.topology import Topology


def test_what_is_no_header_of_ours_is_told_and_not_followed(monkeypatch):
    message = "all ranks must make the same calls"
    for index, dimensions, size in ((99, 1, 1), (-1, 1, 1), (0, 99, 1), (0, -1, 1), (0, 1, -1)):
        header = torch.tensor([index, dimensions, *[size] * 14])
        monkeypatch.setattr(point_to_point.dist, "recv", lambda tensor, src, header=header: tensor.copy_(header))
        monkeypatch.setattr(point_to_point, "current_topology", lambda: Topology(0, 2))
        with pytest.raises(ps.MismatchError, match=message):
            ps.comms.recv_tensor((1,), 1)
