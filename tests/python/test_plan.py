"""Sizes of models, what is chosen and predicted for them, and what would help: on machines made of round numbers."""

import json
from dataclasses import replace

import pytest
from plan_cases import GB, H200, RTX_4090, FakeProbe, machine, with_quota, write_config

from kt_kernel import _core
from kt_kernel.errors import UserError
from kt_kernel.machine.facts import Disk
from kt_kernel.machine.products import Products
from kt_kernel.plan import choices, predict, sizes
from kt_kernel.plan import plan as plans
from kt_kernel.plan.choices import EMBEDDED, SGLANG, Wanted
from kt_kernel.plan.gpu import gpu_plan, is_known
from kt_kernel.plan.hints import hints
from kt_kernel.plan.model import PlannedModel, model_of_folder
from kt_kernel.plan.plan import Planner
from kt_kernel.registry.known import known_models

KNOWN = {model.name: model.facts for model in known_models()}
QWEN = KNOWN["Qwen3-30B-A3B"]
DEEPSEEK = KNOWN["DeepSeek-V3-0324"]


@pytest.fixture(autouse=True)
def _large_disk(monkeypatch):
    """Not this machine's, which may be full."""
    monkeypatch.setattr(plans, "disk_of", lambda folder: Disk("/", "/dev/sda", 10**12, 10**12))


def planner(folder, facts=QWEN, here=None, wanted=None, **options) -> Planner:
    return Planner(PlannedModel("m", facts), here or machine(), wanted or Wanted(), folder, **options)


def test_config_json_says_what_the_registry_says(tmp_path):
    assert model_of_folder("m", write_config(tmp_path)).facts == QWEN.__class__(
        **{**QWEN.__dict__, "dense_intermediate": 6144}
    )


@pytest.mark.parametrize(
    ("said", "encoding"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4}, "int4z"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "rawint4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "fp8c"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (None, "bf16"),
    ],
)
def test_encodings(tmp_path, said, encoding):
    assert model_of_folder("m", write_config(tmp_path, quantization_config=said)).facts.encoding == encoding


def test_latent_attention_shared_experts_and_states(tmp_path):
    mla = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    facts = model_of_folder("m", write_config(tmp_path, n_shared_experts=2, first_k_dense_replace=3, **mla)).facts
    assert (facts.mla.kv_rank, facts.shared_experts, facts.dense_layers) == (512, 2, 3)
    assert sizes.kv_token_bytes(facts) == 48 * (512 + 64) * 2
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12
    facts = model_of_folder("m", write_config(tmp_path, layer_types=kinds)).facts
    assert facts.full_attention_every == 4
    assert not predict.decodes_natively(facts)
    windows = ["sliding_attention", "full_attention"] * 24
    assert model_of_folder("m", write_config(tmp_path, layer_types=windows)).facts.full_attention_every == 1
    shared = {"shared_expert_intermediate_size": 1536}
    assert model_of_folder("m", write_config(tmp_path, **shared)).facts.shared_experts == 2


def test_what_cannot_be_planned_says_why(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        model_of_folder("m", tmp_path)
    with pytest.raises(UserError, match="is it a model with experts"):
        model_of_folder("m", write_config(tmp_path, num_experts=None))
    with pytest.raises(UserError, match="vocab_size is 'x'"):
        model_of_folder("m", write_config(tmp_path, vocab_size="x"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        model_of_folder("m", tmp_path)


def test_sizes_of_known_models():
    """Against the sizes that the hub shows, to a few percent."""
    for name, gigabytes in {
        "Qwen3-30B-A3B": 61.1,
        "DeepSeek-V3-0324": 688,
        "gpt-oss-120b": 65,
        "Mixtral-8x7B": 93.4,
        "MiniMax-M2": 230,
        "GLM-4.5-Air": 221,
    }.items():
        assert sizes.checkpoint_bytes(KNOWN[name]) / GB == pytest.approx(gigabytes, rel=0.06), name


def test_packed_bytes_are_those_of_a_layer():
    layer = _core.MoELayer(
        _core.Pool([1], [-1], [[]]),
        format="int4g",
        num_experts=2,
        top_k=1,
        hidden_size=2048,
        intermediate_size=768,
        max_tokens=1,
    )
    assert sizes.packed_expert_bytes("int4g", 2048, 768) == layer.packed_bytes_per_expert
    assert sizes.expert_bytes(QWEN, "int4g") == 48 * 128 * layer.packed_bytes_per_expert
    assert sizes.token_expert_bytes(QWEN, "int4g") == 48 * 8 * layer.packed_bytes_per_expert


def test_decode_is_the_sum_of_its_parts():
    found = predict.predict_decode(FakeProbe(), QWEN, "int4g", context=1000)
    expert = 3 * 2048 * 768
    assert found.parts["experts"] == pytest.approx(48 * 8 * expert * 0.5 / 100e9)
    others = 48 * (2048 * 128 * 72 + 128 * 2048)
    assert found.parts["linears"] == pytest.approx(2 * others / 100e9)
    assert found.parts["head"] == pytest.approx(2 * 151936 * 2048 / 100e9)
    assert found.parts["barriers"] == pytest.approx(48 * 10e-6)
    assert found.parts["attention"] == pytest.approx(48 * 1000 * 1e-9)
    assert found.tokens_per_s == pytest.approx(1 / sum(found.parts.values()))


def test_models_with_states_decode_at_the_pace_of_torch():
    found = predict.predict_decode(FakeProbe(), KNOWN["Qwen3-Next-80B-A3B"], "int4g")
    assert found.parts["operations"] == pytest.approx(48 * 101e-6)
    assert "barriers" not in found.parts


def test_a_prompt_is_read_in_the_pieces_of_the_engine():
    probe, free = FakeProbe(), FakeProbe()
    # All experts of 48 layers take 0.15 s to read, for 64 tokens already.
    assert predict.chunk_size(probe, QWEN, "int4g", "bf16") == 32
    free.products = lambda *_: Products(((1, 1e-15), (256, 1e-15)), 0.0)
    assert predict.chunk_size(free, QWEN, "int4g", "bf16") == 1024  # of 2048, attention alone would take 0.2 s
    found = predict.predict_prefill(probe, QWEN, "int4g", tokens=512)
    assert found.tokens == 512
    assert found.tokens_per_s > predict.predict_decode(probe, QWEN, "int4g").tokens_per_s


def test_active_experts():
    assert predict.active_experts(QWEN, 1) == pytest.approx(8)
    assert 127 < predict.active_experts(QWEN, 512) <= 128


def test_a_gpu_that_holds_all_experts_leaves_nothing_to_the_cpu(tmp_path):
    small = planner(tmp_path, QWEN, machine(8 * GB, gpus=(H200,)), sglang=True)
    chosen = small.choose()
    assert chosen.all_on_gpu
    assert chosen.fits  # 61 GB, in 8 GB of the CPU's memory
    assert "all of a layer" in chosen.choices["gpu experts"].reason
    plan = small.plan(FakeProbe())
    assert (plan.alternatives, plan.token_bytes) == ((), 0)
    one_less = planner(tmp_path, QWEN, machine(8 * GB, gpus=(H200,)), Wanted(gpu_experts=127), sglang=True).choose()
    assert not one_less.all_on_gpu
    assert not one_less.fits


def test_a_small_model_waits_for_sglangs_python(tmp_path):
    """Measured: 550 to 810 tokens/s, 15 to 25 ms to the first token."""
    tiny = replace(QWEN, layers=4)
    plan = planner(tmp_path, tiny, machine(8 * GB, gpus=(H200,)), sglang=True).plan(FakeProbe())
    assert plan.decode.tokens_per_s == pytest.approx(1 / 1.5e-3)
    assert plan.prefill.seconds == pytest.approx(15e-3)
    large = planner(tmp_path, QWEN, machine(80 * GB, gpus=(H200,)), Wanted(gpu_experts=8), sglang=True)
    assert large.plan(FakeProbe()).decode.parts["scheduling"] == 0


def test_a_cpu_is_left_to_the_thread_that_drives_the_gpu():
    alone = machine(gpus=(H200,))
    assert choices.choose_threads(alone, Wanted(), SGLANG).value == 15
    assert choices.choose_threads(alone, Wanted(), EMBEDDED).value == 16
    assert choices.choose_threads(alone, Wanted(threads=16), SGLANG).value == 16
    siblings = replace(alone, nodes=(replace(alone.nodes[0], cpus=tuple(range(32))),))
    assert choices.choose_threads(siblings, Wanted(), SGLANG).value == 16


@pytest.mark.parametrize(
    ("gpus", "sglang", "engine"), [((), False, EMBEDDED), ((), True, EMBEDDED), ((H200,), False, EMBEDDED)]
)
def test_the_embedded_engine_needs_nothing(gpus, sglang, engine):
    assert choices.choose_engine(machine(gpus=gpus), Wanted(), sglang).value == engine


def test_sglang_where_it_is_and_there_is_a_gpu():
    found = choices.choose_engine(machine(gpus=(H200,)), Wanted(), True)
    assert found.value == SGLANG
    assert "H200" in found.reason
    assert choices.choose_engine(machine(gpus=(H200,)), Wanted(engine=EMBEDDED), True).reason == "asked for"
    with pytest.raises(UserError, match="not installed"):
        choices.choose_engine(machine(gpus=(H200,)), Wanted(engine=SGLANG), False)
    with pytest.raises(UserError, match="needs a GPU"):
        choices.choose_engine(machine(), Wanted(engine=SGLANG), True)


@pytest.mark.parametrize(("available", "method"), [(80, "BF16"), (48, "AMXINT8"), (24, "INT4G"), (8, "INT4G")])
def test_the_method_is_the_first_that_fits(tmp_path, available, method):
    chosen = planner(tmp_path, here=machine(available * GB)).choose()
    assert chosen.method == method
    assert chosen.needs[0].fits == (available > 8)
    assert ("does not fit" in chosen.choices["method"].reason) == (available == 8)


def test_who_decides_on_the_method(tmp_path):
    assert planner(tmp_path, default_method="AMXINT4").choose().method == "AMXINT4"
    wanted = Wanted(method="AMXINT8", sources={"method": "config.yaml"})
    found = planner(tmp_path, wanted=wanted, default_method="AMXINT4").choose().choices["method"]
    assert (found.value, found.reason) == ("AMXINT8", "set in config.yaml")
    assert planner(tmp_path, wanted=Wanted(method="auto")).choose().method in choices.candidates(QWEN)
    with pytest.raises(UserError, match="INT3"):
        planner(tmp_path, wanted=Wanted(method="INT3")).choose()
    assert choices.candidates(DEEPSEEK) == ("FP8", "INT4G")
    assert choices.candidates(KNOWN["gpt-oss-20b"]) == ("MXFP4",)


def test_threads_and_nodes(tmp_path):
    assert planner(tmp_path).choose().threads == 16
    few = planner(tmp_path, here=with_quota(machine(), 4.5)).choose().choices["threads"]
    assert few.value == 4
    assert "cgroup" in few.reason
    assert planner(tmp_path, here=machine(nodes=2)).choose().choices["numa nodes"].value == (0, 1)
    assert planner(tmp_path, here=machine(nodes=2), wanted=Wanted(nodes=(1,))).choose().choices["numa nodes"].value == (
        1,
    )
    with pytest.raises(UserError, match="no NUMA node 7"):
        planner(tmp_path, wanted=Wanted(nodes=(7,))).choose()


def test_context_and_slots_are_those_of_the_engine(tmp_path):
    found = planner(tmp_path, here=machine(40 * GB)).choose().choices
    assert found["context"].value <= QWEN.context
    assert found["slots"].value >= 1
    given = planner(tmp_path, wanted=Wanted(context=1000, slots=3)).choose().choices
    assert (given["context"].value, given["slots"].value) == (1000, 3)


def test_gpu_experts_are_what_fits(tmp_path):
    one = planner(tmp_path, DEEPSEEK, machine(800 * GB, gpus=(RTX_4090,)), sglang=True).choose()
    assert one.gpu.gpu_experts == 0
    assert one.gpu.needed_bytes > RTX_4090.free_bytes or one.gpu.fits
    big = planner(tmp_path, DEEPSEEK, machine(800 * GB, gpus=(H200,)), sglang=True).choose()
    assert 20 < big.gpu.gpu_experts < 60  # 2.6 GB for one of each layer
    assert big.gpu.fits
    more = gpu_plan(DEEPSEEK, (H200,), big.gpu.tokens, big.gpu.gpu_experts + 1)
    assert not more.fits
    given = planner(tmp_path, DEEPSEEK, machine(800 * GB, gpus=(H200,)), Wanted(gpu_experts=3), sglang=True).choose()
    assert (given.gpu.gpu_experts, given.choices["gpu experts"].reason) == (3, "asked for")
    assert is_known(H200)


def test_a_split_is_faster_with_more_experts_on_the_gpu(tmp_path):
    rates = []
    for experts in (0, 32, 128):
        wanted = Wanted(gpu_experts=experts)
        plan = planner(tmp_path, QWEN, machine(80 * GB, gpus=(H200,)), wanted, sglang=True).plan(FakeProbe())
        rates.append((plan.decode.tokens_per_s, plan.prefill.tokens_per_s))
    assert rates[0] < rates[1] < rates[2]


def test_the_plan_of_a_model_that_fits(tmp_path):
    plan = planner(tmp_path, here=machine(80 * GB)).plan(FakeProbe())
    assert plan.chosen.fits
    assert [other.method for other in plan.alternatives] == ["AMXINT8", "INT4G"]
    assert all(other.fits and other.decode for other in plan.alternatives)
    assert plan.load_disk_s > plan.load_memory_s > 0
    assert any("--method INT4G would decode" in line for line in hints(plan, Wanted()))


def test_other_methods_are_measured_only_while_there_is_time(tmp_path):
    probe = FakeProbe()
    probe.measured_s = 9.0
    assert [other.decode for other in planner(tmp_path).plan(probe).alternatives] == [None, None]


def test_what_would_help(tmp_path):
    def told(here, wanted=None, facts=QWEN, **options) -> str:
        found = planner(tmp_path, facts, here, wanted, **options)
        return " | ".join(hints(found.plan(FakeProbe()), wanted or Wanted()))

    assert "it fits with --method INT4G" in told(machine(30 * GB), Wanted(method="BF16"))
    assert "it fits with --context" in told(machine(20 * GB), Wanted(method="INT4G", context=40960))
    assert "the smallest method needs" in told(machine(8 * GB))
    beside = told(machine(50 * GB, gpus=(H200,)), Wanted(method="BF16", gpu_experts=100), sglang=True)
    assert "KT_KERNEL_SKIP_GPU_EXPERTS=1" in beside
    small = told(machine(800 * GB, gpus=(RTX_4090,)), facts=DEEPSEEK, sglang=True)
    assert "missing on each GPU" in small
    long = told(machine(80 * GB, gpus=(RTX_4090,)), Wanted(context=400_000), sglang=True)
    assert "it fits with --max-total-tokens" in long


def test_a_download_needs_its_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "disk_of", lambda folder: machine().disks[0])
    found = planner(tmp_path, DEEPSEEK, machine(800 * GB))
    need = found.choose().needs[-1]
    assert (need.what, need.fits) == ("disk", False)
    assert any("missing on the disk" in line for line in hints(found.plan(FakeProbe()), Wanted()))
    here = Planner(PlannedModel("m", QWEN, tmp_path, 5), machine(80 * GB), Wanted(), tmp_path)
    assert [need.what for need in here.choose().needs] == ["memory"]


def test_a_plan_as_json(tmp_path):
    from kt_kernel.cli.plan_report import as_dict

    here = machine(80 * GB, gpus=(H200,))
    plan = planner(tmp_path, here=here, sglang=True).plan(FakeProbe())
    said = json.loads(json.dumps(as_dict(plan, here, Wanted()), default=str))
    assert said["choices"]["gpu experts"]["reason"]
    assert said["decode"]["tokens_per_s"] == pytest.approx(1 / sum(said["decode"]["seconds"].values()))
    assert {need["what"] for need in said["needs"]} == {"memory", "GPU memory", "disk"}
