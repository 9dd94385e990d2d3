"""The part of the contract for a second way to the same store."""

from __future__ import annotations

from typing import TypeVar

from django_dlock.testing import BackendContract

C = TypeVar("C", bound=type[BackendContract])

EACH_COMMAND = frozenset(
    {
        # Acquire, release and the wake-up between them, under contention.
        "test_g1_the_count_under_the_lock_is_exact",
        "test_a_waiter_is_woken_by_the_release",
        "test_a_waiter_is_woken_by_a_break",
        "test_g3_tokens_rise_from_grant_to_grant",
        "test_g9_a_lease_counts_from_before_its_request",
        # Renewals and releases of one lease and of many.
        "test_g2_the_renewal_of_a_lease_taken_over_is_told",
        "test_many_leases_are_renewed_in_order",
        "test_a_renewal_is_sent_and_read_apart",
        "test_each_of_many_releases_has_an_outcome_of_its_own",
        # What the store remembers, and the kinds of leases.
        "test_g5_a_repeated_acquire_after_its_release_grants_nothing",
        "test_g5_a_release_tells_an_expired_and_a_broken_lease_apart",
        "test_g7_an_attempt_cancelled_before_it_arrives_is_never_granted",
        "test_min_hold_keeps_the_name_taken_after_its_release",
        "test_a_lease_passes_to_a_request_that_names_its_owner",
        "test_a_reservation_is_prolonged_until_it_is_released",
        # Names decide where a key is kept.
        "test_names_are_compared_exactly",
        # What operators read.
        "test_a_lease_is_told_in_full",
        "test_lists_are_in_order_of_the_grants_and_paged",
        "test_lists_are_searched_by_task_and_path_too",
        "test_waiters_are_listed_in_order_of_arrival",
        # Connections.
        "test_g4_a_process_that_has_deregistered_is_dead",
        "test_g8_a_forked_child_locks_and_leaves_the_parent_its_lease",
        "test_a_closed_backend_may_be_used_again",
    }
)
"""Together they send each command once, and use each capability once."""


def each_command(contract: C) -> C:
    """Remove from the class all tests of the contract but those that send each command once.

    Use it for a second way to a store that runs the whole contract elsewhere, such as a Sentinel,
    a pooler or a node of a cluster. What a command decides is tested there. Here it is tested that
    each command and its answer get through.
    """
    tests = {name for name in dir(BackendContract) if name.startswith("test_")}
    assert tests >= EACH_COMMAND, EACH_COMMAND - tests
    for name in tests - EACH_COMMAND:
        setattr(contract, name, None)
    return contract
