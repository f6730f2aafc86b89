"""Which tests run when: with others, alone, or only in ``make test-nightly``.

A test runs nightly if it takes seconds of processor time and a shorter test of the same mechanism,
named here, is part of ``make test``.
"""

import re
from collections import Counter
from dataclasses import dataclass

import pytest

# Tests that measure time or use the whole machine; no other test runs at the same time.
ALONE = (
    # Emulates links and processors of a given speed.
    "tests/bench/test_bench_cluster.py",
    # A thread of low priority prepares deltas: 13 s per test alone, 110 s if other tests run.
    "tests/faults/test_served_deltas.py",
)

# Tests on random problems: always the same few in `make test`, many new ones at night.
RANDOM_PROBLEMS = (
    "tests/search/test_random_problems.py::"
    "test_plans_satisfy_their_problem_and_none_is_below_the_bound",
    "tests/search/test_random_problems.py::test_checker_and_search_prove_the_same_bound",
    "tests/search/test_properties.py",
)

# Tests that depend most on the versions of torch, torchrec and fbgemm (`make test-versions`).
VERSIONS = tuple(f"tests/integration/test_{name}.py" for name in (
    "torchrec_modules", "torchrec_plans", "torchrec_world", "torch_modules", "inside_torch",
    "fused_optimizer", "managed_collision", "checkpoint", "checkpoint_torchrec", "inference"))

# The slowest files run first, so that none of them still runs when all other workers are done.
FIRST = tuple(f"tests/{name}" for name in (
    "train/", "bench/", "cuda/", "faults/", "integration/", "programs/", "search/", "test_demo",
    "test_docs"))


@dataclass(frozen=True, slots=True)
class Nightly:
    """A test that only runs nightly.

    Attributes:
        test: file and function, ``tests/x.py::test_y``.
        stays: the test of the same mechanism that ``make test`` runs.
        only: regular expression of the parameters that run nightly; by default all.
    """

    test: str
    stays: str
    only: str = ".*"


NIGHTLY = (
    # ---- builds, documents -----------------------------------------------------------------------
    Nightly("tests/test_wheel.py::test_the_source_distribution_has_all_files_for_tests_and_documents",
            "a build without torch says what to do; test_declarations.py"),
    Nightly("tests/test_wheel.py::test_the_wheel_serves_every_python",
            "make setup builds the same libraries"),
    Nightly("tests/test_wheel.py::test_the_wheel_works_away_from_the_checkout",
            "make setup builds the same libraries"),
    Nightly("tests/test_docs.py::test_blocks_run", "the blocks of README.md", r"(?!README).*"),
    Nightly("tests/test_docs.py::test_notebooks_run", "bench_record", "compare_plans|explore"),
    # The host compiles and runs the same sources for tests/cuda/test_emulated.py.
    Nightly("tests/cuda/test_compiled.py::test_hot_kernels_keep_rows_in_registers",
            "test_emulated.py"),
    Nightly("tests/cuda/test_compiled.py::test_rows_are_fetched_in_parts_of_16_bytes",
            "test_emulated.py"),
    Nightly("tests/cuda/test_compiled.py::test_torch_symbols_are_in_the_stable_interface",
            "test_emulated.py"),
    # ---- data ------------------------------------------------------------------------------------
    Nightly("tests/data/test_resuming.py::test_killed_runs_resume_where_they_stopped",
            "test_cuts.py kills a run of one and of two; test_a_resumed_run_reads_no_unit_twice"),
    Nightly("tests/data/test_resuming.py::test_many_jobs_that_begin_together_never_mix",
            "test_another_job_is_refused_while_a_run_is_active"),
    Nightly("tests/data/test_resuming.py::test_a_full_disk_is_named_with_its_path",
            "test_time_splits.py::test_a_full_disk_is_named"),
    Nightly("tests/data/test_resuming.py::test_under_torchrun_and_as_an_array_job",
            "test_output_does_not_depend_on_workers"),
    Nightly("tests/data/test_resuming.py::test_another_job_is_refused_while_a_run_is_active",
            "a run that is killed", "False"),
    Nightly("tests/data/test_synthetic.py::"
            "test_metas_locality_histogram_is_reproduced_within_a_hundredth",
            "test_power_laws_have_their_rows_and_shares; test_draws_follow_the_popularity"),
    Nightly("tests/data/test_synthetic.py::"
            "test_criteo_columns_have_the_published_numbers_of_values",
            "test_cardinality_fit_finds_a_known_law"),
    # ---- benchmarks ------------------------------------------------------------------------------
    Nightly("tests/bench/test_bench_data.py::test_bags_of_sessions_are_trained_once_and_in_full",
            "data/test_loader.py::test_deduplicated_batches_pool_to_the_same"),
    Nightly("tests/bench/test_bench_recommenders.py::test_runs_on_another_log_are_not_used",
            "test_a_record_holds_intervals_and_paired_differences"),
    Nightly("tests/bench/test_bench_serve.py::test_candidates_are_named_once_and_in_full",
            "serve/test_model.py has candidates and full rows"),
    Nightly("tests/bench/test_bench_serve.py::test_publications_under_load",
            "tests/shmem/test_publication.py; the other cases of the benchmark"),
    Nightly("tests/bench/test_bench_serve.py::test_deltas_are_served_under_load",
            "tests/faults/test_served_deltas.py; test_torn_answers_are_found"),
    Nightly("tests/bench/test_bench_models.py::test_the_simulator",
            "rl_rec/test_off_policy.py and test_sqn.py learn from the same logs"),
    Nightly("tests/bench/test_bench_models.py::test_labels_of_counts_give_fewer_false_edges_than_shares",
            "rl_rec/test_concepts.py::test_independent_counts_have_no_edges"),
    Nightly("tests/bench/test_bench_models.py::test_codes_of_models_are_scored",
            "test_users_choose_by_their_tastes; rl_rec/test_concepts.py has the scores, "
            "rl_rec/test_cadvae.py given concepts and graphs"),
    Nightly("tests/bench/test_bench_models.py::test_training_steps_of_a_recommender",
            "test_tables_alone_get_batches_without_cached_results; "
            "test_bench_lookup.py::test_two_processes_measure_and_verify"),
    Nightly("tests/bench/test_bench_lookup.py::test_cross_networks_in_both_precisions",
            "test_two_processes_measure_and_verify has a DLRM; integration/test_dense_parts.py and "
            "train/test_train.py have cross networks"),
    Nightly("tests/bench/test_bench_lookup.py::test_ranks_that_share_no_memory",
            "test_two_processes_measure_and_verify; tests/shmem/test_traffic.py"),
    Nightly("tests/bench/test_bench_cluster.py::test_two_hosts_measure_and_verify",
            "test_bench_lookup.py::test_two_processes_measure_and_verify; "
            "test_no_namespace_is_left; tests/shmem/test_traffic.py"),
    Nightly("tests/bench/test_bench_plan.py::test_torchrec_is_a_peer",
            "tests/integration/test_torchrec_plans.py reads TorchRec's plans; "
            "test_a_planner_that_dies_counts_as_one_without_plans"),
    Nightly("tests/bench/test_bench_recommenders.py::test_protocols_of_published_tables",
            "test_a_record_has_several_protocols_and_the_graph"),
    Nightly("tests/bench/test_bench_serve.py::test_http_is_compared_with_scoring_in_process",
            "test_contenders_score_alike_and_answer_every_query; tests/serve has the HTTP server"),
    Nightly("tests/bench/test_bench_serve.py::test_types_by_hotness_are_compared_with_int8_rows",
            "tests/shmem/test_publication.py; test_contenders_score_alike_and_answer_every_query"),
    Nightly("tests/bench/test_bench_plan.py::test_seeds_and_measured_machines",
            "test_record_and_table plans for the published machines"),
    Nightly("tests/bench/test_bench_lookup.py::test_quality_on_a_log_that_drifts",
            "test_the_bytes_of_a_directory_are_those_it_takes; "
            "test_the_vocabulary_is_that_of_the_first_day"),
    Nightly("tests/bench/test_calibrate.py::test_the_verb_measures_real_processes",
            "test_a_single_rank_is_measured; test_the_fit_finds_the_constants_of_the_model"),
    # ---- the search ------------------------------------------------------------------------------
    Nightly("tests/search/test_random_problems.py::test_bound_optimum_and_search_are_in_order",
            "one seed on each machine", "[1-9]-.*"),
    Nightly("tests/search/test_hardware.py::"
            "test_plans_for_shared_links_are_no_slower_there_than_plans_for_shares",
            "test_bound.py bounds both from below; test_cost.py has their loads"),
    Nightly("tests/search/test_bound.py::"
            "test_each_row_is_a_bound_that_some_plan_nearly_attains",
            "shared links and unequal hosts", "(?!shared-uneven-training$).*"),
    Nightly("tests/search/test_constraints.py::test_the_planner_splits_only_tables_that_may_be_split",
            "shmem/test_optimizers.py: such plans are refused"),
    Nightly("tests/search/test_constraints.py::"
            "test_rows_that_may_not_be_striped_are_divided_by_ranges", "one of the optimizers",
            "optimizers1"),
    Nightly("tests/search/test_branching.py::test_no_plan_is_below_the_bound_of_its_own_node",
            "one seed on each topology, with costs or without", "False-[1-9]-.*|True-[02-9]-.*"),
    Nightly("tests/search/test_annealing.py::test_loads_in_the_search_equal_the_cost_model",
            "one seed on each topology", "[1-9]-.*"),
    Nightly("tests/search/test_explain.py::test_the_mean_of_many_steps_is_what_the_model_predicts",
            "one objective of each topology and bits, both for one memory",
            "hosts-training|(8 bits|16 bits|racks|shared)-inference"),
    Nightly("tests/search/test_explain.py::test_loads_and_savings_equal_the_cost_model",
            "two seeds", "[23]"),
    Nightly("tests/search/test_message_costs.py::test_no_other_bits_within_the_budget_are_faster",
            "hosts with shared links, and racks", "topology0"),
    Nightly("tests/search/test_baselines.py::test_no_peer_beats_the_plan",
            "one seed of each objective", "training-[123]|inference-[023]"),
    # ---- the runtime -----------------------------------------------------------------------------
    Nightly("tests/shmem/test_exchange.py::test_push_columns_weights_and_optimizers",
            "optimizers that exchange sums over column pieces on two and on four ranks; Adam",
            r"host-(rowwise_adagrad|partial_rowwise_adam)-\(0, 1, [12], .*"
            r"|host-(sgd|adagrad|momentum_sgd)-.*|device-(sgd|adam)-.*"),
    Nightly("tests/shmem/test_row_dtypes.py::test_one_step_is_the_fp32_step_rounded",
            "each optimizer with one of the two types",
            r"float16-.*(adam|lamb|lars).*|bfloat16-(?!.*(adam|lamb|lars)).*"),
    Nightly("tests/shmem/test_micro_batches.py::test_equals_whole_batches",
            "within a memory domain and between two; every optimizer in one of them",
            "domains2-.*|None-(rowwise_adagrad_l2|adam)|domains1-sgd"),
    Nightly("tests/shmem/test_keys.py::test_all_keys_new",
            "a million keys through ten thousand rows", "10000000-.*"),
    Nightly("tests/shmem/test_agreement.py::test_a_rank_that_skips_a_step",
            "two ranks; domains ab and aba", "three"),
    Nightly("tests/shmem/test_agreement.py::test_a_rank_that_makes_another_call_is_named",
            "two ranks", "(backward passes-aaa|steps-abc)-.*"),
    Nightly("tests/faults/test_faults.py::test_a_rank_stalls",
            "update and migration; a rank is killed at every phase", "outbox|checkpoint write"),
    Nightly("tests/faults/test_faults.py::test_a_rank_is_slow", "forward and barrier",
            "replica broadcast"),
    Nightly("tests/faults/test_faults.py::test_a_rank_is_killed_for_memory", "update",
            "checkpoint write"),
    Nightly("tests/faults/test_served_deltas.py::test_dropped_doubled_reordered_and_damaged_deltas",
            "integration/test_publication_from_deltas.py; a killed trainer, server and worker"),
    Nightly("tests/integration/test_bounded_checkpoint.py::test_survivors_save_one_step_or_nothing",
            "one loss each at forward and update, of two ranks",
            r".*-barrier-.*|3-outbox-1|3-update-3"),
    Nightly("tests/integration/test_checkpoint_torchrec.py::test_checkpoints_between_torchrec_and_oper",
            "table-wise with its state; test_column_wise_state_is_converted_both_ways",
            "row_wise-both|column_wise-model"),
    Nightly("tests/integration/test_checkpoint_torchrec.py::"
            "test_converted_column_wise_state_equals_table_wise_state",
            "test_column_wise_state_is_converted_both_ways"),
    Nightly("tests/integration/test_publication_from_deltas.py::test_many_changes_equal_full_publications",
            "200 changes", "1000"),
    Nightly("tests/integration/test_inside_torch.py::"
            "test_the_default_back_end_compiles_lookups_of_unknown_sizes",
            "test_compiled_training_is_bitwise_eager_training has another back end"),
    Nightly("tests/integration/test_inside_torch.py::"
            "test_the_default_back_end_trains_tables_beside_dense_layers",
            "test_updates_read_no_memory_that_a_graph_has_used_again"),
    Nightly("tests/integration/test_inside_torch.py::"
            "test_compiled_training_is_bitwise_eager_training", "with weights", "False"),
    Nightly("tests/integration/test_deltas.py::test_a_checkpoint_and_its_deltas_restore_the_run",
            "two ranks and a plan with column pieces", "1-3|2-5"),
    Nightly("tests/integration/test_publication_from_deltas.py::"
            "test_every_step_equals_a_full_publication",
            "rows of 4 bits on two ranks, of 8 bits on one", "2-101-None|2-105-float16"),
    Nightly("tests/integration/test_dynamic_deltas.py::test_hosts_change_no_bit",
            "four ranks on two hosts", "abb-0-mixed"),
    Nightly("tests/integration/test_groups_of_models.py::test_groups_have_the_keys_of_one_group",
            "two hosts, each of two groups", "|abcd"),
    Nightly("tests/integration/test_groups_of_models.py::test_models_are_trained_and_saved",
            "two hosts, after every update and with a delay", "1-0-|2-0-abcd"),
    Nightly("tests/integration/test_checkpoint.py::test_another_world_size_resumes",
            "one rank, with chunks and without", ".*-4-.*"),
    Nightly("tests/integration/test_checkpoint.py::test_16_bit_rows_move_between_plans_and_hosts",
            "one rank; two hosts", "aa-102"),
    Nightly("tests/integration/test_publication_from_deltas.py::"
            "test_a_delta_of_groups_has_the_rows_of_its_step",
            "synchronized every three updates, with a delay and 8 bits", "101-1-0-32"),
    Nightly("tests/programs/test_programs.py::test_more_programs",
            "a third of these programs: test_one_rank and test_two_ranks"),
    Nightly("tests/programs/test_programs.py::test_planted_faults_are_found",
            "four of them, and the random programs of the unchanged code",
            r"(?!writes are lost$|padding is trained$|copies share their rows$"
            r"|learning rates stay$).*"),
    Nightly("tests/shmem/test_pull.py::test_the_same_bits", "two ranks", "4-.*"),
    Nightly("tests/shmem/test_message_bits.py::test_runs_repeat_bit_by_bit",
            "8 bits, and 8 bits in one direction", r"16|4|\(32, 8\)"),
    Nightly("tests/integration/test_torchrec_plans.py::test_planner_in_distributed_model_parallel",
            "test_a_planning_error_reaches_all_ranks; test_torchrec_world.py has "
            "DistributedModelParallel and its pipelines"),
    Nightly("tests/integration/test_dynamic_deltas.py::test_a_chain_restores_the_run",
            "two ranks, a delta after every step", "1-1-3"),
    # ---- the emulated device ---------------------------------------------------------------------
    Nightly("tests/cuda/test_emulated.py::test_training_gives_the_hosts_bits",
            "each plan at least once; one, two, four and eight ranks",
            r"1-(replicated|owned|mixed[02])|2-(striped|mixed[12])|4-(replicated|owned|mixed[01])"),
    Nightly("tests/cuda/test_emulated.py::test_push_and_column_pieces",
            "each optimizer with and without column pieces; one, two and three ranks",
            r"(?!rowwise_adagrad-(True-1|False-0)|partial_rowwise_adam-(True-0|False-1)"
            r"|lars_sgd-(True-2|False-0)|partial_rowwise_lamb-(True-1|False-2)).*"),
    Nightly("tests/cuda/test_emulated.py::test_optimizers", "each optimizer on one or on two ranks",
            "1-(adagrad|adam|momentum_sgd|lamb|l2|decoupled)|2-(sgd|partial_rowwise_adam|lars_sgd"
            "|partial_rowwise_lamb)"),
    Nightly("tests/cuda/test_emulated.py::test_rows_fetched_once_give_the_hosts_bits",
            "each amount of memory, with weights and without, two and three ranks",
            "2-rich0-.*-float16-.*|2-rich1-.*-float32-.*|"
            "2-mixed1-False-.*-(768|0)|2-mixed1-True-.*-(None|768)|3-mixed1-False-.*-(None|768)"
            "|3-mixed1-True-.*-(None|0)"),
    Nightly("tests/cuda/test_emulated.py::test_dims",
            "a width of each class of rows", r"dims(1|2|4|7|8|11|15|17)"),
    Nightly("tests/cuda/test_keys_on_devices.py::test_training_gives_the_hosts_bits",
            "five of the rules, on one, two and four ranks", "(1|2|4|7)-.*"),
    Nightly("tests/cuda/test_refused.py::test_tables_continue_after_a_refused_batch",
            "one, two and four ranks; each reason under a plan that pushes or one that pulls",
            "8-.*|2-pushed-(negative length|number of lengths|no bags)"
            "|2-pulled-(id|sum of lengths|gradient)"),
    Nightly("tests/cuda/test_short_steps.py::test_few_kernels", "one and two ranks", "8"),
    Nightly("tests/cuda/test_domains.py::test_sent_bytes_equal_those_of_the_host_back_end",
            "exact messages, and 16 bits in one direction", r"16|\(32, 16\)"),
    # ---- training --------------------------------------------------------------------------------
    Nightly("tests/rl_rec/test_off_policy.py::test_a_high_return_beats_the_behaviour_policy",
            "test_calibrated_targets_interpolate_achieved_returns; rl_rec/test_sqn.py"),
    Nightly("tests/rl_rec/test_sqn.py::test_learned_policies_do_better_than_the_log",
            "cloned and td3+bc", "cql|dqn|iql"),
    Nightly("tests/test_demo.py::test_shard_dlrm", "under torchrun", "alone"),
    Nightly("tests/rl_rec/test_concepts.py::test_real_edges_are_found",
            "each graph of several edges, with one of the two activities",
            r"edges0-.*|edges[14]-0\.0|edges[23]-0\.8"),
    Nightly("tests/rl_rec/test_concepts.py::test_the_true_edges_are_recovered", "two seeds",
            "[23]"),
    Nightly("tests/report/test_pages.py::test_in_a_browser",
            "every page, dark, on a phone; one page, light, on a desktop",
            "(stats|drift|bench)-1280-False"),
    Nightly("tests/serve/test_model.py::test_a_signal_ends_a_start",
            "SIGTERM; test_sigterm_while_modules_are_imported_ends_a_start", "2"),
    Nightly("tests/train/test_train.py::test_two_processes",
            "with cross layers; with TorchRec's sharding", "oper-0"),
    Nightly("tests/train/test_train.py::test_sharded_equals_unsharded",
            "a model of sequences, two autoencoders and popularity; cdt4rec in two processes",
            "dt|cdt4rec|macridvae"),
    Nightly("tests/train/test_train.py::test_a_recommender_in_two_processes",
            "oper; test_train.py has two processes of TorchRec", "torchrec"),
    Nightly("tests/train/test_resume.py::test_killed_runs_end_with_the_same_weights", "dlrm",
            "cadvae"),
    Nightly("tests/train/test_resume.py::test_a_recommender_continues", "cadvae", "cdt4rec"),
    Nightly("tests/train/test_resume.py::test_torchrun_starts_again_from_the_last_checkpoint",
            "test_killed_runs_end_with_the_same_weights"),
    Nightly("tests/rl_rec/test_harness.py::test_losses_equal_the_unsharded_ones",
            "a model with learned concepts, one with item features, one of bags",
            "cadvae|causal|untied|sasrec|hstu"),
    Nightly("tests/rl_rec/test_sqn.py::test_future_rewards_count",
            "test_losses_are_those_of_their_definition"),
    Nightly("tests/rl_rec/test_cdt4rec.py::test_rewards_of_actions_that_were_never_logged",
            "test_estimated_returns_exclude_luck"),
    Nightly("tests/rl_rec/test_hstu.py::test_times_predict_the_next_item",
            "test_item_features.py::test_actions_predict_the_next_item"),
    Nightly("tests/rl_rec/test_off_policy.py::test_graded_logs_are_graded",
            "test_the_oracle_is_best"),
    Nightly("tests/train/test_serving.py::test_two_ranks_train_and_the_server_has_the_same_scores",
            "test_a_server_follows_the_steps_of_a_run"),
    Nightly("tests/train/test_dynamic.py::test_deltas_lead_to_the_weights_of_the_run",
            "rows of 8 bits", "None"),
)

# Tests with many parametrized cases: `make test` runs every second or third case, and those with a
# parameter's value that no case before has; the others run nightly.
SAMPLED = {
    "tests/cuda/test_short_steps.py::test_streams_that_work_late_give_the_hosts_bits": 2,
    "tests/search/test_branching.py::test_no_plan_is_below_the_bound_of_its_own_node": 3,
    "tests/search/test_certificate.py::test_consumption_of_a_piece_equals_the_cost_model": 8,
    "tests/search/test_cost.py::test_unit_loads_equal_the_cost_model": 3,
    "tests/shmem/test_exactness.py::test_training_equals_the_unsharded_run": 3,
    "tests/shmem/test_exchange.py::test_lookups_without_gradients_sequences_and_weight_gradients":
    2,
    "tests/shmem/test_exchange.py::test_placements": 2,
    "tests/shmem/test_micro_batches.py::test_equals_whole_batches": 2,
    "tests/shmem/test_replica_groups.py::test_gradients_of_all_groups_equal_the_unsharded_run": 3,
    "tests/shmem/test_replica_groups.py::test_rows_are_averaged": 2,
    "tests/shmem/test_shared_bags.py::test_rows_and_updates_equal_those_of_copied_bags": 2,
}


def arrange(items: list[pytest.Item]) -> None:
    """Mark tests ``alone`` and ``slow`` as listed above, and put files that take long first."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    listed = {n.test: n for n in NIGHTLY}
    seen: Counter[str] = Counter()
    values: set[tuple[str, str, str]] = set()  # test, parameter, value
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        left = listed.get(test)
        if left is not None and re.fullmatch(left.only, parameters.removesuffix("]")):
            item.add_marker(pytest.mark.slow)
        elif test in SAMPLED:
            of = {(test, name, repr(x)) for name, x in item.callspec.params.items()}
            if seen[test] % SAMPLED[test] and of <= values:
                item.add_marker(pytest.mark.slow)
            values |= of
            seen[test] += 1
        if item.nodeid.startswith(ALONE):
            item.add_marker(pytest.mark.alone)
