"""Errors: one table, both ways."""

from __future__ import annotations

import grpc
import pytest

from services.common import errors, setting_names
from services.common.grpc_status import ERROR_METADATA_KEY, error_of, status_of


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._code = code
        self._metadata = metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "details"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._metadata


@pytest.mark.parametrize("name", sorted(setting_names.ALL))
def test_a_refused_setting_is_named_once(name: str) -> None:
    """In front of a message that names none, on its way through gRPC too; one that names it, or another that is to change, stays."""
    refused = errors.ConfigError("no such folder", param=name)
    assert refused.message == str(refused) == f"{name}: no such folder"
    assert errors.from_json(refused.to_json()).message == refused.message
    for said in (f"{name}=1 is wrong", "cannot: unset GLM53_MODE", "choose another PORT"):
        assert errors.ConfigError(said, param=name).message == said
    assert errors.ConfigError("no such folder", param="gateway").message == "no such folder"


@pytest.mark.parametrize("cls", sorted(errors.ERROR_TYPES.values(), key=lambda c: c.__name__))
def test_an_error_survives_the_way_through_grpc(cls: type[errors.Glm53Error]) -> None:
    """Type, message, field and retry hint arrive as they were sent."""
    sent = cls("what is wrong", param="messages[0]", retry_after_s=1.5)
    got = error_of(FakeRpcError(status_of(sent), ((ERROR_METADATA_KEY, sent.to_json().encode()),)))
    assert (got.code, got.message, got.param, got.retry_after_s) == (sent.code, sent.message, sent.param, sent.retry_after_s)


def test_a_worker_that_cannot_be_reached_is_not_ready() -> None:
    """A connection error becomes NotReady with a retry hint, not an internal error."""
    got = error_of(FakeRpcError(grpc.StatusCode.UNAVAILABLE))
    assert isinstance(got, errors.NotReady)
    assert got.retry_after_s


def test_subclasses_share_the_status_of_their_base_unless_they_have_their_own() -> None:
    """The table is looked up in class order."""
    assert status_of(errors.ContextLengthExceeded("")) == grpc.StatusCode.OUT_OF_RANGE
    assert status_of(errors.InvalidRequest("")) == grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(errors.CheckpointError("")) == grpc.StatusCode.INTERNAL
