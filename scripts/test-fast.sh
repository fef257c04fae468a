#!/usr/bin/env bash
# What can be tested in a few minutes: the libraries alone, and the main jobs with real guests.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0
guests=(
    consistent::a_restored_guest_is_checkpointed_and_restored_again
    exact::two_ram_regions_are_both_exact
    verbs::
    lazy::the_hottest_pages_come_first
    incremental::one_whose_page_table_is_damaged_is_nothing_to_begin_with
    killed::a_guardian_killed_alone_harms_nothing
    upgrade::a_busy_guest_moves_to_another_qemu_and_back
    freeze::a_frozen_guest_goes_on_and_so_does_its_chain
    redis::a_full_server_fails_the_checkpoint_alone
    adopt::an_adopted_guest_moves_and_freezes
    containers::a_container_goes_on_where_it_was_saved
    migrate::a_guest_moves_there_and_back
    warm_reboot::another_qemu_and_a_freeze_leave_the_disks_served_and_the_next_reboot_warm
    host_reboot::a_plan_tells_what_would_be_lost
)
cargo test --workspace -q --lib --bins
cargo test -p dewar-testkit -q --test layout --test import_cycles
# One that was marked as long is run all the same.
cargo test -p dewar-cli -q --test guests -- --test-threads=3 --include-ignored "${guests[@]}"
# A name that no test has any more must not pass.
for name in "${guests[@]}"; do
    cargo test -p dewar-cli -q --test guests -- --list "$name" 2>/dev/null | grep ': test$' >/dev/null ||
        { echo "test-fast: there is no test $name"; exit 1; }
done
