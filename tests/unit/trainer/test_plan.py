"""`plan`: every term against real objects, what moves against real runs, what is said when it is too much."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.planning import know_seconds
from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.tiny_drafter import drafter_config, make_ends
from tests.support.trainer_runs import settings_for
from trainer.config import OptimConfig
from trainer.data.buckets import bucket_edges, build_epoch_plan
from trainer.drafter.masks import FULL
from trainer.drafter.model import Drafter, build_drafter
from trainer.errors import ConfigError
from trainer.flags import resolve
from trainer.optim.adamw import AdamWSettings, MasterAdamW
from trainer.pipeline import transfer
from trainer.planning import check, measure
from trainer.planning.budget import Budget, Term, drafter_config_terms, slots_term, state_bytes
from trainer.planning.check import check_memory, judge
from trainer.planning.facts import Facts, outline_facts
from trainer.planning.fit import GIB, find_ways_out, refusal, with_value
from trainer.planning.meter import PeakMeter
from trainer.planning.outline import DrafterLoad, drafter_needs, measure_microbatch, target_needs
from trainer.planning.packs import pack_facts
from trainer.planning.render import render_budgets, render_verdict
from trainer.planning.split import Rates, best_split, counted_rates, drafter_flops, evaluate
from trainer.target.loader import load_target, outline_target

LOAD = DrafterLoad(
    lengths=(150, 90, 200), max_anchors=60, head_chunk_rows=64, attention="dense", has_noise=True
)


def by_name(terms):
    return {term.name: term.nbytes for term in terms}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    tiny_target(folder), write_tiny_corpus(folder / "data")
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return make_config(folder)


def make_config(folder, **changes):
    settings = settings_for(folder / "tiny-target-0", folder / "data", folder / "out", **changes)
    return resolve({}, overrides=settings, environ={}).config


# --- what stays -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_masters_moments_and_sums_are_those_of_the_real_objects(dtype):
    shape = drafter_config(num_hidden_layers=3, layer_types=(FULL,) * 3)
    drafter = build_drafter(shape, seed=0, dtype=dtype)
    optimizer = MasterAdamW(drafter.named_parameters(), AdamWSettings.from_config(OptimConfig()))
    optimizer.accumulate(sum(p.float().sum() for p in drafter.parameters()), torch.ones(()))
    optimizer.step(1e-3)
    state = optimizer.state_sources()

    def stored(kind):
        return sum(t.nbytes for name, t in state.items() if name.startswith(f"{kind}."))

    terms = by_name(drafter_config_terms(shape, dtype=dtype))
    ends = make_ends()

    assert terms["weights"] == sum(p.nbytes for p in drafter.parameters())
    assert terms["fp32 masters"] == (0 if dtype == torch.float32 else stored("master"))
    assert terms["AdamW moments"] == stored("exp_avg") + stored("exp_avg_sq")
    assert terms["gradient sums"] == sum(t.nbytes for t in optimizer.pending_sums() if t.ndim)
    assert terms["embedding and head"] == 2 * ends.head_weight_VD.to(dtype).nbytes
    assert state_bytes(shape) == stored("master") + stored("exp_avg") + stored("exp_avg_sq")


def test_device_slots_are_those_of_sender_and_receiver(config):
    shape = drafter_config()
    slot = transfer._Slot(
        (config.data.token_budget, len(shape.target_layer_ids), shape.hidden_size),
        torch.float32,
        torch.device("cpu"),
    )

    assert slots_term(config, shape, dtype=torch.float32).nbytes == transfer.DEVICE_SLOTS * slot.buffer.nbytes


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_outlined_target_has_the_size_and_facts_of_the_loaded_one(tmp_path, tied):
    path = tiny_target(tmp_path, tie_word_embeddings=tied)
    real = load_target(path, device="cpu", dtype=torch.bfloat16)
    outline = outline_target(path, dtype=torch.bfloat16)

    assert outline.info == real.info
    assert sum(t.nbytes for t in outline.tensors().values()) == sum(t.nbytes for t in real.tensors().values())
    assert outline.device.type == "meta"


# --- what moves -----------------------------------------------------------------------------------------


def saved_bytes(drafter, ends, load, dtype):
    """Bytes that a real forward keeps for its backward: distinct storages, weights and inputs left out."""
    stores = {}

    def keep(tensor):
        stores[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        phases = measure_microbatch(drafter, ends, load, feature_dtype=dtype)
    del phases
    outside = {t.untyped_storage()._cdata for t in (*drafter.parameters(), *dataclasses.astuple(ends)[:2])}
    return sum(t.untyped_storage().nbytes() for key, t in stores.items() if key not in outside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "shape", [{}, {"intermediate_size": 256, "num_hidden_layers": 4}], ids=["small", "deep"]
)
def test_predicted_activations_are_what_a_real_forward_saves(dtype, shape):
    layers = shape.get("num_hidden_layers", 2)
    config = drafter_config(**shape, layer_types=(FULL,) * layers)
    ends = make_ends()
    ends = dataclasses.replace(
        ends, embed_weight_VD=ends.embed_weight_VD.to(dtype), head_weight_VD=ends.head_weight_VD.to(dtype)
    )
    real = saved_bytes(build_drafter(config, seed=0, dtype=dtype), ends, LOAD, dtype)

    with torch.device("meta"):
        outline = Drafter(config).to(dtype)
        empty = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
    phases = measure_microbatch(
        outline,
        dataclasses.replace(ends, embed_weight_VD=empty, head_weight_VD=empty),
        LOAD,
        feature_dtype=dtype,
    )
    backward = next(phase for phase in phases if phase.name == "backward")

    assert backward.begin == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("attention", ["dense", "sdpa"])
def test_predicted_peak_of_a_microbatch_is_that_of_a_real_one(attention):
    config, load = drafter_config(), dataclasses.replace(LOAD, attention=attention)
    phases = measure_microbatch(
        build_drafter(config, seed=0, dtype=torch.float32), make_ends(), load, feature_dtype=torch.float32
    )

    needs = drafter_needs(config, load, dtype=torch.float32)

    assert needs.peak == pytest.approx(max(phase.peak for phase in phases), rel=0.1)


def test_masked_grouped_heads_are_repeated_on_cuda_and_scores_never_spelled_out():
    """torch's fused kernels group heads without a mask only; measured in `tests/gpu/test_plan_on_gpu.py`."""
    grouped, load = drafter_config(), dataclasses.replace(LOAD, attention="sdpa")
    on_cuda = dataclasses.replace(load, on_cuda=True)

    def needs(config, load):
        return drafter_needs(config, load, dtype=torch.float32).peak

    spelled_out = needs(grouped, dataclasses.replace(load, attention="dense"))
    assert needs(grouped, load) < needs(grouped, on_cuda) < spelled_out
    equal = drafter_config(num_key_value_heads=grouped.num_attention_heads)
    assert needs(equal, load) == needs(equal, on_cuda)


def test_a_smaller_head_chunk_moves_the_peak_out_of_the_loss():
    config = drafter_config(vocab_size=50_000)
    large = drafter_needs(config, dataclasses.replace(LOAD, head_chunk_rows=4096), dtype=torch.float32)
    small = drafter_needs(config, dataclasses.replace(LOAD, head_chunk_rows=1), dtype=torch.float32)

    assert large.where == "loss"
    assert small.where != "loss"
    assert large.peak - small.peak > 150 * 50_000 * 4


@pytest.mark.parametrize("samples", [1, 6])
def test_predicted_peak_of_a_prefill_is_that_of_a_real_one(folder, samples):
    path = folder / "tiny-target-0"
    real = load_target(path, device="cpu", dtype=torch.float32)
    measured = target_needs(real, (1, 5), samples=samples, length=200, with_last_hidden=False)

    needs = target_needs(
        outline_target(path, dtype=torch.float32), (1, 5), samples=samples, length=200, with_last_hidden=False
    )

    assert needs.peak == pytest.approx(measured.peak, rel=0.1)


def test_a_target_that_cannot_run_dry_is_counted_by_hand_and_says_so(folder, config, monkeypatch):
    facts = outline_facts(config, lengths=[40] * 24)
    dry = facts.device_budgets(config)[0]

    def refuse(*words, **options):
        raise RuntimeError("values are looked at")

    monkeypatch.setattr(facts.target, "hidden_states", refuse)
    counted = facts.device_budgets(config)[0]

    assert "cannot run dry: RuntimeError: values are looked at" in counted.notes[0]
    assert 0.3 < counted.total / dry.total < 3.0


def test_the_meter_sees_memory_come_and_go():
    with PeakMeter("cpu") as meter:
        first = torch.zeros(1024)
        with meter.phase("inner"):
            second = torch.zeros(2048)
            del second
        view = first[:10]

    assert (meter.live, meter.peak) == (4096, 4096 + 8192)
    assert meter.phases[0].workspace == 8192
    del first, view
    assert meter.live == 0


# --- packs ----------------------------------------------------------------------------------------------


def test_no_pack_of_any_epoch_is_larger_than_the_largest(config):
    lengths = [5 + 7 * n % 60 for n in range(200)]
    facts = pack_facts(config, lengths)

    for epoch in range(20):
        for item in build_epoch_plan(
            lengths,
            seed=0,
            epoch=epoch,
            token_budget=config.data.token_budget,
            max_batch_size=config.data.max_batch_size,
            edges=bucket_edges(config.data.max_seq_len),
        ):
            pack = [lengths[sample] for sample in item.sample_ids]
            assert sum(pack) <= facts.most_tokens
            assert len(pack) * max(pack) <= facts.worst_batch[0] * facts.worst_batch[1]
    assert facts.tokens_per_epoch == sum(lengths)


# --- split ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "target", "drafter", "expected"),
    [
        (8, 2_900.0, 19_000.0, (7, 1)),
        (8, 10.0, 10.0, (4, 4)),
        (8, 14.5, 24.2, (5, 3)),
        (2, 1.0, 100.0, (1, 1)),
        (3, 1.0, 100.0, (2, 1)),
    ],
)
def test_the_split_follows_from_the_two_rates(gpus, target, drafter, expected):
    rates = Rates(target=target, drafter=drafter, is_measured=True)

    best = best_split(gpus, rates)

    assert (best.targets, best.drafters) == expected
    assert all(best.tokens_per_s >= evaluate(n, gpus - n, rates).tokens_per_s for n in range(1, gpus))


def test_one_gpu_does_both_in_turn():
    split = best_split(1, Rates(target=30.0, drafter=60.0, is_measured=True))

    assert split.tokens_per_s == pytest.approx(20.0)
    assert split.text == "one GPU for both"


def test_counted_work_of_the_published_shapes(config):
    """The floors of one drafter step and of prefill at Qwen3-8B shapes, counted by hand from the formulas."""
    shape = drafter_config(
        num_hidden_layers=5,
        layer_types=(FULL,) * 5,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        mask_token_id=151669,
        block_size=16,
        num_target_layers=36,
        target_layer_ids=(1, 9, 17, 25, 33),
    )
    changed = with_value(with_value(config, "data.token_budget", 8192), "loss.max_anchors", 512)
    changed = dataclasses.replace(changed, data=dataclasses.replace(changed.data, max_seq_len=8192))
    facts = pack_facts(changed, [8192] * 4)

    # 146 ms at 1.32 times the floor, at about 765 TFLOP/s
    assert drafter_flops(changed, shape, facts) == pytest.approx(0.146 / 1.32 * 765e12, rel=0.06)


def test_counted_rates_need_no_weights(folder, config):
    facts = outline_facts(config, lengths=[40] * 24)

    rates = counted_rates(config, facts.target, facts.drafter(config), facts.packs(config))

    assert not rates.is_measured
    assert min(rates.target, rates.drafter) > 0


@pytest.fixture
def _known_seconds(monkeypatch):
    know_seconds(monkeypatch)


@pytest.mark.usefixtures("_known_seconds")
def test_rates_are_tokens_of_the_pack_over_the_median_seconds(folder, config):
    facts = outline_facts(config, lengths=[40] * 24)
    packs = facts.packs(config)

    measured = measure.measure(config, facts.drafter(config), packs)

    assert measured.tokens == sum(packs.common_lengths) == 120
    assert measured.rates == Rates(target=240.0, drafter=60.0, is_measured=True)


@pytest.mark.parametrize("rates", [(240.0, 60.0), (1234.5, 777.25), (3.0, 3.0)])
@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (1, 3), (2, 5), (7, 1)])
def test_the_predicted_rate_is_the_slower_side_of_all_its_workers(rates, targets, drafters):
    target, drafter = rates

    split = evaluate(targets, drafters, Rates(target=target, drafter=drafter, is_measured=True))

    assert split.tokens_per_s == min(targets * target, drafters * drafter)


# --- what does not fit ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_config(folder):
    return make_config(
        folder,
        devices__target_gpus="0",
        devices__drafter_gpus="1",
        data__token_budget=2048,
        loss__max_anchors=256,
        loss__head_chunk_rows=2048,
    )


def gpu_facts(config, limit):
    return dataclasses.replace(
        outline_facts(config, lengths=[40] * 100), limits={"cuda:0": limit, "cuda:1": limit}
    )


def test_a_way_out_is_the_largest_value_that_fits(gpu_config):
    roomy = gpu_facts(gpu_config, 1 << 40)
    budget = roomy.device_budgets(gpu_config)[1]
    facts = gpu_facts(gpu_config, int(budget.total * 0.999))

    ways = find_ways_out(gpu_config, facts.device_budgets(gpu_config)[1], facts.budget_like)

    assert {way.key for way in ways} >= {"loss.max_anchors"}
    for way in ways:
        assert facts.device_budgets(with_value(gpu_config, way.key, way.value))[1].verdict == "fits"
    grain = {"loss.max_anchors": 32, "loss.head_chunk_rows": 128, "data.token_budget": 512}
    anchors = next(way for way in ways if way.key == "loss.max_anchors")
    more = with_value(gpu_config, anchors.key, anchors.value + grain[anchors.key])
    assert facts.device_budgets(more)[1].verdict == "too large"


def test_host_and_disk_have_ways_out_too(config):
    facts = dataclasses.replace(outline_facts(config, lengths=[40] * 500), limits={})
    by = {budget.name: budget for budget in facts.budgets(config)}
    limits = {name: int(by[name].total * 0.9) for name in ("host", "disk of --output-dir")}
    wide = with_value(config, "queue.hs_max_depth", 1_000_000)
    facts = dataclasses.replace(facts, limits=limits)

    disk = next(budget for budget in facts.budgets(config) if budget.name.startswith("disk"))

    assert [way.text for way in find_ways_out(config, disk, facts.budget_like)] == ["--keep-checkpoints 2"]
    host = next(budget for budget in facts.budgets(wide) if budget.name == "host")
    queued = next(term for term in host.terms if term.name == "queue of hidden states")
    assert queued.nbytes <= limits["host"] * 2 // 5


def test_alike_workers_are_planned_alike_and_shown_once(folder):
    config = make_config(folder, devices__target_gpus="0,1,2,3", devices__drafter_gpus="4,5,6")
    facts = dataclasses.replace(outline_facts(config, lengths=[40] * 100), limits={})

    budgets = facts.device_budgets(config)
    tables = render_budgets(budgets)

    assert [budget.name for budget in budgets] == [
        *(f"target on cuda:{n}" for n in range(4)),
        *(f"drafter on cuda:{n}" for n in range(4, 7)),
    ]
    assert [table.split("  ")[0] for table in tables] == [
        "target on cuda:0 to cuda:3, each",
        "drafter on cuda:4",
        "drafter on cuda:5, cuda:6, each",
    ]
    for budget in budgets:
        assert facts.budget_like(config, budget) == budget


def test_a_refusal_names_memory_term_bytes_and_way_out(gpu_config):
    budget = Budget(
        name="drafter on cuda:1", terms=(Term("weights", GIB), Term("activations", 3 * GIB)), limit=2 * GIB
    )
    text = str(refusal(budget, []))

    assert text == (
        "drafter on cuda:1 needs 4.00 GiB of 2.00 GiB; largest term: activations 3.00 GiB "
        "(3221225472 bytes); no single setting is enough: lower --token-budget and --max-anchors together"
    )


def test_training_refuses_weights_that_no_setting_makes_fit_and_only_warns_of_activations(gpu_config, caplog):
    roomy = gpu_facts(gpu_config, 1 << 40).device_budgets(gpu_config)[1]

    judge(gpu_facts(gpu_config, roomy.certain + 1).device_budgets(gpu_config))
    with pytest.raises(ConfigError, match=r"no setting changes .* take a larger device"):
        judge(gpu_facts(gpu_config, roomy.certain // 2).device_budgets(gpu_config))

    assert "needs up to" in caplog.text


def test_a_prediction_that_fails_keeps_no_run_from_starting(gpu_config, folder, caplog):
    (folder / "strange").mkdir()
    (folder / "strange" / "config.json").write_text('{"model_type": "nobody knows"}')
    paths = dataclasses.replace(gpu_config.paths, target_model=str(folder / "strange"))

    check_memory(dataclasses.replace(gpu_config, paths=paths))

    assert "memory was not planned (ConfigError" in caplog.text


def test_cpu_devices_are_not_checked(config, monkeypatch):
    monkeypatch.setattr(check, "outline_facts", pytest.fail)

    check_memory(config)


def test_evaluation_needs_room_for_its_drafter_on_the_first_target(folder):
    (folder / "prompts.jsonl").write_text("{}\n")
    plain = make_config(folder, devices__target_gpus="0,1", devices__drafter_gpus="2")
    evaluating = dataclasses.replace(
        plain, eval=dataclasses.replace(plain.eval, every=5, prompts=str(folder / "prompts.jsonl"))
    )
    facts = dataclasses.replace(outline_facts(plain, lengths=[40] * 24), limits={})

    without, room = facts.device_budgets(plain), facts.device_budgets(evaluating)

    assert room[0].total > without[0].total
    assert room[1:] == without[1:]


def test_an_unknown_limit_is_unknown_not_enough(gpu_config):
    facts = Facts(target=gpu_facts(gpu_config, 1).target, lengths=[40] * 10)

    assert [budget.verdict for budget in facts.device_budgets(gpu_config)] == ["unknown", "unknown"]


def test_target_and_drafter_of_one_gpu_share_its_memory(folder):
    config = make_config(folder, devices__target_gpus="0", devices__drafter_gpus="0")
    apart = make_config(folder, devices__target_gpus="0", devices__drafter_gpus="1")

    together = gpu_facts(config, 1 << 40).device_budgets(config)
    separate = gpu_facts(apart, 1 << 40).device_budgets(apart)

    assert [budget.name for budget in together] == ["target and drafter on cuda:0"]
    assert together[0].total == sum(budget.total for budget in separate)


def _budget(name, nbytes, limit):
    return Budget(name=name, terms=(Term("weights", nbytes, "all"), Term("none", 0)), limit=limit)


def test_a_table_has_sizes_in_units_one_below_the_other_and_no_zeros():
    [table] = render_budgets([_budget("drafter on cuda:1", 3 << 20, 2 * GIB)], {"cuda:1": GIB})

    head, term = table.splitlines()
    assert head.index("MiB") == term.index("MiB")
    assert head.endswith("3.0 MiB  of 2.00 GiB (1.00 GiB free now), 2.00 GiB to spare")
    assert term.endswith("3.0 MiB  all")


def test_the_verdict_names_the_tightest_and_what_other_processes_hold():
    budgets = [_budget("drafter on cuda:1", 3 * GIB, 4 * GIB), _budget("host", GIB, 40 * GIB)]

    fits, held = render_verdict(budgets), render_verdict(budgets, {"cuda:1": 2 * GIB})

    assert fits == "verdict   fits; tightest: drafter on cuda:1, 1.00 GiB to spare"
    assert "not now: drafter on cuda:1 needs 3.00 GiB and 2.00 GiB are free" in held
