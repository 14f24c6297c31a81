"""The plugin's method over SGLang's own kt_ep_wrapper.py, both releases, on CPU tensors: layers against float32.

And its record of experts on the GPU beside SGLang's own recorder.
"""

import functools
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from layer_reference import Shape, random_batch, random_expert
from sglang_file import (
    STOCK,
    Combine,
    Layer,
    OwnExperts,
    arguments,
    load,
    load_recorder,
    make_recorder,
    one_thread_of_torch,
    torch,
    write_checkpoint,
)
from wrapper_cases import tensor_of_bits

from kt_kernel.integrations.sglang import engine, hooks, plan, record
from kt_kernel.integrations.sglang.method import method_class
from kt_kernel.integrations.sglang.options import Options
from kt_kernel.integrations.sglang.record import MaskRecord
from kt_kernel.integrations.sglang.residents import Residents

SHAPE = Shape(experts=8, top_k=3, hidden=128, intermediate=192)
LAYERS = 3
LIMIT = 0.01  # relative error of a whole layer; without one of 8 experts 0.3 and more
DROPPED = 0.2
LONG = 32  # tokens: the threshold
STREAMED = Options(kt_gpu_prefill_token_threshold=LONG)
DYNAMIC = Options(kt_gpu_prefill_token_threshold=LONG, kt_enable_dynamic_expert_update=True)


class Experts(OwnExperts):
    """The engine's own experts, laid out as a checkpoint has them."""

    def process_weights_after_loading(self, layer) -> None:
        pass


class FlippedExperts(Experts):
    """Laid out otherwise after loading, once, as Marlin's weights are; what is only needed before is dropped."""

    def create_weights(self, layer, num_experts, *args, **named) -> None:
        super().create_weights(layer, num_experts, *args, **named)
        layer.order = torch.nn.Parameter(torch.zeros(num_experts, 5), requires_grad=False)

    def process_weights_after_loading(self, layer) -> None:
        if getattr(layer, "is_converted", False):
            return
        layer.is_converted = True
        layer.order = torch.nn.Parameter(torch.zeros(layer.order.shape[0], 0), requires_grad=False)
        for name in ("w13_weight", "w2_weight"):
            param = getattr(layer, name)
            param.data = param.data.flip(-1).contiguous()

    def apply(self, layer, dispatch) -> Combine:
        straight = SimpleNamespace(w13_weight=layer.w13_weight.flip(-1), w2_weight=layer.w2_weight.flip(-1))
        return super().apply(straight, dispatch)


class TransposedExperts(Experts):
    """Loaded the other way round."""

    def create_weights(self, layer, *args, **named) -> None:
        super().create_weights(layer, *args, **named)
        for name in ("w13_weight", "w2_weight"):
            turned = torch.nn.Parameter(getattr(layer, name).data.transpose(1, 2).contiguous(), requires_grad=False)
            turned.is_transposed = True
            setattr(layer, name, turned)

    def apply(self, layer, dispatch) -> Combine:
        turned = [getattr(layer, name).transpose(1, 2) for name in ("w13_weight", "w2_weight")]
        return super().apply(SimpleNamespace(w13_weight=turned[0], w2_weight=turned[1]), dispatch)


class PluginLayer(Layer):
    """Weights of the engine's experts come through the hook of its loader."""

    def _own(self) -> list[int]:
        def load(layer, param, loaded_weight, weight_name, shard_id, expert_id):
            turned = getattr(param, "is_transposed", False)
            param.data[expert_id] = loaded_weight.t() if turned else loaded_weight

        self._layer.quant_method = self.method
        for expert, (gate, up, down) in enumerate(self._experts):
            for name, value in (("w13_weight", torch.cat([gate, up])), ("w2_weight", down)):
                named = {"weight_name": name, "shard_id": name, "expert_id": expert}
                hooks._load_expert(
                    load, self._layer, param=getattr(self._layer, name), loaded_weight=value.bfloat16(), **named
                )
        return []

    def on_cpu(self) -> list[int]:
        return (~self.method.wrapper.gpu_experts_mask).nonzero().flatten().tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE, LAYERS)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with one_thread_of_torch():
        yield


@pytest.fixture
def model(monkeypatch, checkpoint):
    """(release, options of the plugin, ...) -> the layers of a model."""

    def make(given: Options, release=STOCK[0], rank=0, ranks=1, experts=Experts, **named) -> list[PluginLayer]:
        args = arguments(SHAPE, LAYERS, checkpoint, release=release, model_path="model", _kt_options=given, **named)
        file = load(monkeypatch, release, SHAPE, args, rank)
        context = sys.modules["sglang.srt.runtime_context"]
        context.get_parallel = lambda: SimpleNamespace(tp_rank=rank, tp_size=ranks)
        context.get_flags = lambda: SimpleNamespace(moe=SimpleNamespace(in_speculative_scope=False))
        ours = method_class(file.KTEPWrapperMethod)
        module = SimpleNamespace(
            KTEPWrapperMethod=lambda _, config: ours(experts(), config),
            create_kt_config_from_server_args=partial(hooks._kt_config, file.create_kt_config_from_server_args),
        )
        weights = [[random_expert(SHAPE, layer, expert) for expert in range(SHAPE.experts)] for layer in range(LAYERS)]
        return [PluginLayer(module, args, index, SHAPE, weights[index]) for index in range(LAYERS)]

    return make


def tokens(count: int, seed: int = 0, kind=torch.int32):
    x, ids, weights = random_batch(SHAPE, count, seed)
    return tensor_of_bits(x), torch.from_numpy(ids).to(kind), torch.from_numpy(weights)


@pytest.mark.parametrize("release", STOCK)
@pytest.mark.parametrize("strategy", ["uniform", "front-loading", "random"])
def test_a_layer_is_the_whole_layer(model, release, strategy):
    layers = model(Options(kt_expert_placement_strategy=strategy), release, kt_num_gpu_experts=3)
    assert sum(layer.method.residents.count for layer in layers) == 3 * LAYERS
    for layer in layers:
        for count, kind in ((1, torch.int32), (7, torch.int64), (64, torch.int32)):
            assert layer.error(*tokens(count, kind=kind)) < LIMIT


def test_sglang_takes_it_for_its_own(model):
    method = model(Options())[0].method
    assert type(method).__name__ == "KTEPWrapperMethod"
    assert method.num_gpu_experts == -1


def test_an_expert_that_is_left_out_is_noticed(model):
    layer = model(Options())[0]
    layer.method.wrapper.gpu_experts_mask[5] = True
    assert layer.error(*tokens(64)) > DROPPED


def test_the_ratio_and_counts_of_a_recorder(model, tmp_path):
    counts = torch.zeros(2, LAYERS, SHAPE.experts, dtype=torch.int64)
    counts[1, 0, 6], counts[0, 2, [1, 4]] = 9, torch.tensor([8, 7])
    torch.save({"logical_count": counts}, tmp_path / "counts.pt")
    given = Options(
        kt_expert_placement_strategy="frequency",
        kt_gpu_experts_ratio=3 / (LAYERS * SHAPE.experts),
        statistics=str(tmp_path / "counts.pt"),
    )
    layers = model(given, kt_num_gpu_experts=None)
    assert [layer.method.residents.ids for layer in layers] == [[6], [], [1, 4]]
    for layer in layers:
        assert layer.error(*tokens(7)) < LIMIT


def test_ids_of_nobody_count_for_nobody(model):
    layer = model(STREAMED)[0]
    for count in (7, LONG):
        x, ids, weights = tokens(count)
        ids[::2, 1] = -1
        assert layer.error(x, ids, weights) < LIMIT


def test_deferred_experts_are_not_lost_in_the_last_layer(model):
    layers = model(Options(), kt_max_deferred_experts_per_token=2)
    assert [layer.method.wrapper.max_deferred_experts_per_token for layer in layers] == [2, 2, 0]


@pytest.mark.parametrize("in_model", [True, False])
def test_the_factor_of_routed_experts(model, monkeypatch, in_model):
    """Where the model multiplies, nothing here may; else both sides must."""
    monkeypatch.setattr(engine, "model_scales_output", lambda: in_model)
    layer = model(Options())[0]
    config = SimpleNamespace(activation="silu", num_local_experts=0, routed_scaling_factor=2.5)
    layer.method.create_moe_runner(layer._layer, config)
    assert config.routed_scaling_factor == (None if in_model else 2.5)
    assert config.inplace is False
    x, ids, weights = tokens(5)
    ids = torch.where(ids < 2, 7, ids)  # the CPU's alone
    expected = layer.expected(x, ids, weights) * (1 if in_model else 2.5)
    assert (layer(x, ids, weights) - expected).norm() < LIMIT * expected.norm()


def test_what_is_refused(model):
    layer = model(Options())[0]
    for name, value, message in (
        ("moe_ep_size", 2, "use --ep-size 1"),
        ("num_fused_shared_experts", 1, "needs --disable-shared-experts-fusion"),
    ):
        refused = SimpleNamespace(**{name: value})
        with pytest.raises(ValueError, match=message):
            layer.method._refuse(refused)
    layer.method.moe_runner_config.activation = "gelu"
    with pytest.raises(ValueError, match="experts with gelu cannot be on the CPU"):
        layer(*tokens(2))
    with pytest.raises(ValueError, match="leaves routing as str, unreadable for the CPU; choose triton"):
        layer.method.apply(layer._layer, SimpleNamespace(topk_output="", hidden_states=None))


class TestRanks:
    def test_the_first_has_the_experts_of_the_cpu(self, model, monkeypatch):
        sent = []
        monkeypatch.setattr(engine, "broadcast_from_first", sent.append)
        given = tokens(7)
        first, second = (model(Options(), rank=rank, ranks=2)[0] for rank in (0, 1))
        assert [masks.shape for masks in sent] == [(LAYERS, SHAPE.experts)] * 2
        assert second.method.wrapper is None
        x, ids, weights = given
        own = first.expected(x, torch.where(ids < 2, ids, -1), weights)
        assert (second(*given) - own).norm() < LIMIT * own.norm()

    def test_without_experts_on_the_gpu_the_others_add_nothing(self, model, monkeypatch):
        monkeypatch.setattr(engine, "broadcast_from_first", lambda _: None)
        second = model(Options(), rank=1, ranks=2, kt_num_gpu_experts=0)[0]
        assert not second(*tokens(7)).any()


class TestLongPrompts:
    @pytest.mark.parametrize("release", STOCK)
    @pytest.mark.parametrize("experts", [Experts, FlippedExperts, TransposedExperts])
    def test_are_computed_by_the_engine_alone(self, model, release, experts):
        for layer in model(STREAMED, release, experts=experts, kt_num_gpu_experts=3):
            assert layer.method.prefill is not None
            assert layer.method.prefill.weights.laid_out == (experts is not Experts)
            assert layer.error(*tokens(LONG - 1)) < LIMIT  # both sides
            layer.method.wrapper.submit_forward = None  # the CPU may not be asked
            for count in (LONG, 3 * LONG):
                assert layer.error(*tokens(count, seed=count)) < LIMIT

    @pytest.mark.parametrize("on_gpu", [0, 8])
    def test_all_experts_on_one_side(self, model, on_gpu):
        layers = model(STREAMED, kt_num_gpu_experts=on_gpu)
        assert (layers[0].method.wrapper is None) == (on_gpu == 8)
        for layer in layers:
            assert layer.error(*tokens(5)) < LIMIT
            assert layer.error(*tokens(LONG)) < LIMIT

    def test_weights_that_do_not_fit_are_told_and_left_out(self, model, caplog):
        layers = model(STREAMED, kt_method="AMXINT8")
        assert (
            caplog.text.count("--kt-gpu-prefill-token-threshold is left out: --kt-method AMXINT8 keeps experts in") == 1
        )
        assert layers[0].method.prefill is None
        assert layers[0].error(*tokens(LONG)) < 0.03

    def test_weights_of_other_sizes(self, model, caplog):
        class Padded(Experts):
            def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, *a, **named):
                super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, *a, **named)
                if num_experts > 2:  # of the layer that is streamed to
                    layer.w2_weight = torch.nn.Parameter(
                        torch.zeros(num_experts, hidden_size, 256), requires_grad=False
                    )

        layers = model(STREAMED, experts=Padded)
        assert layers[0].method.prefill is None
        assert "w2_weight has 131072 bytes for an expert on the GPU, and --kt-method sends 49152" in caplog.text


class TestMovedExperts:
    def test_the_most_used_stay_on_the_gpu(self, model):
        layers = model(DYNAMIC, kt_num_gpu_experts=3)
        x, ids, weights = tokens(LONG)
        ids[:, :] = torch.tensor([[5, 7, 2]])
        ids[:3, 0] = 1
        for number, layer in enumerate(layers):
            assert layer.error(x, ids, weights) < LIMIT
            heard = [2, 5, 7] if number == LAYERS - 1 else [0, 1, 2]  # the CPU when the last layer is through
            assert layers[0].method.residents.ids == heard
        for layer in layers:
            assert layer.on_cpu() == [0, 1, 3, 4, 6]
            assert layer.method.residents.table.tolist() == [-1, -1, 0, -1, -1, 1, -1, 2, -1]
            assert layer.error(*tokens(7)) < LIMIT
            assert layer.error(*tokens(LONG + 1)) < LIMIT  # copies what is there now

    def test_short_prompts_move_nothing(self, model):
        layers = model(DYNAMIC)
        for layer in layers:
            layer(*tokens(LONG - 1))
        assert [layer.method.residents.ids for layer in layers] == [[0, 1]] * LAYERS


RECORDED = Options(LONG, True, record_kt_gpu_expert_distribution=True)


class Hooked:
    """SGLang's registry, for the methods of one class."""

    BEFORE, AFTER = range(2)

    def __init__(self, hooked: type):
        self._class = hooked

    def register(self, target: str, hook, kind: int) -> None:
        module, _, name = target.rpartition(".")
        assert module == engine.RECORDER
        original = getattr(self._class, name)

        @functools.wraps(original)
        def wrapper(*args, **named):
            if kind == self.BEFORE:
                assert hook(*args, **named) is None
                return original(*args, **named)
            result = original(*args, **named)
            assert hook(result, *args, **named) is None
            return result

        setattr(self._class, name, wrapper)


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    """(release) -> SGLang's recorder with our hooks, of the model that was made last; it writes to tmp_path."""

    def make(release=STOCK[0]):
        args = plan.current_plan().server_args
        file = load_recorder(monkeypatch, release, args, tmp_path)
        real = Hooked(file._ExpertDistributionRecorderReal)
        hooks._register_record(real, real)
        return make_recorder(file, release, SHAPE, args)

    return make


def run_pass(recorder, layers, given) -> None:
    with recorder.with_forward_pass(1, None):
        for layer in layers:
            layer(*given)


def dumped(recorder, folder) -> "torch.Tensor":
    """What a dump writes, which is then gone from the folder."""
    recorder.dump_record()
    [path] = folder.glob("gpu_expert_distribution_*.pt")
    found = torch.load(path, weights_only=True)
    assert list(found) == ["gpu_expert_masks"]
    assert found["gpu_expert_masks"].dtype == torch.bool
    [counts] = folder.glob("expert_distribution_recorder_*.pt")
    assert len(list(folder.iterdir())) == 2  # nothing half-written
    path.unlink()
    counts.unlink()
    return found["gpu_expert_masks"]


class TestRecord:
    @pytest.mark.parametrize("release", STOCK)
    def test_masks_that_change_in_the_middle(self, model, recorder, release, tmp_path):
        layers = model(RECORDED, release, kt_num_gpu_experts=2)
        recorder = recorder(release)
        run_pass(recorder, layers, tokens(3))  # before the start
        recorder.start_record()
        x, ids, weights = tokens(LONG)
        ids[:, :] = torch.tensor([[7, 5, 1]])
        ids[:1, 2] = 7
        for given in (tokens(3), tokens(3, seed=1), (x, ids, weights), tokens(3)):
            run_pass(recorder, layers, given)
        recorder.stop_record()
        run_pass(recorder, layers, tokens(3))  # after the stop
        masks = dumped(recorder, tmp_path)
        assert masks.shape == (4, LAYERS, SHAPE.experts)
        on_gpu = [[masks[step, layer].nonzero().flatten().tolist() for layer in range(LAYERS)] for step in range(4)]
        assert on_gpu == [[[0, 1]] * LAYERS] * 3 + [[[5, 7]] * LAYERS]  # a long prompt moves them when it ends

    def test_records_after_each_other(self, model, recorder, tmp_path):
        layers = model(RECORDED)
        recorder = recorder()
        for passes in (3, 1):
            recorder.start_record()
            for _ in range(passes):
                run_pass(recorder, layers, tokens(2))
            recorder.stop_record()
            assert dumped(recorder, tmp_path).shape[0] == passes
        recorder.start_record()
        run_pass(recorder, layers, tokens(2))
        recorder.start_record()  # what was not dumped is dropped, as SGLang's own counts are
        run_pass(recorder, layers, tokens(2))
        assert dumped(recorder, tmp_path).shape[0] == 1
        run_pass(recorder, layers, tokens(2))  # nobody stopped it
        assert dumped(recorder, tmp_path).shape[0] == 1

    def test_nothing_was_recorded(self, model, recorder, tmp_path, caplog):
        model(RECORDED)
        assert dumped(recorder(), tmp_path).shape == (0, LAYERS, SHAPE.experts)
        assert "no pass was recorded: post to /start_expert_distribution_record" in caplog.text

    def test_a_dump_as_an_object(self, model, recorder, tmp_path):
        layers = model(RECORDED)
        recorder = recorder()
        recorder.start_record()
        run_pass(recorder, layers, tokens(2))
        found = recorder.dump_record(output_mode="object")
        assert found["gpu_expert_masks"].shape == (1, LAYERS, SHAPE.experts)
        assert found["logical_count"].shape[1:] == (LAYERS, SHAPE.experts)
        assert list(tmp_path.iterdir()) == []

    def test_only_where_it_was_asked_for_and_on_the_first_rank(self, model, recorder, monkeypatch, tmp_path):
        monkeypatch.setattr(engine, "broadcast_from_first", lambda _: None)
        for given, rank in ((Options(), 0), (Options(record_kt_gpu_expert_distribution=True), 1)):
            layers = model(given, rank=rank, ranks=2)
            other = recorder()
            other.start_record()
            run_pass(other, layers, tokens(2))
            other.dump_record()
        assert list(tmp_path.glob("gpu_expert_distribution_*")) == []
        monkeypatch.setattr(plan, "_plan", None)  # an SGLang without --kt-weight-path
        run_pass(other, layers, tokens(2))
        other.start_record()
        other.dump_record()
        assert list(tmp_path.glob("gpu_expert_distribution_*")) == []

    def test_layers_without_experts_here_are_all_true(self, model):
        """Dense ones, and those of other pipeline stages."""
        model(RECORDED)
        here = plan.current_plan()
        del here._residents[1]
        here._gpu_masks = None
        assert here.gpu_masks().sum(1).tolist() == [2, SHAPE.experts, 2]

    def test_a_folder_that_cannot_be_written_to_ends_nothing(self, model, recorder, tmp_path, monkeypatch, caplog):
        layers = model(RECORDED)
        recorder = recorder()
        recorder.start_record()
        run_pass(recorder, layers, tokens(2))
        (tmp_path / "file").touch()
        monkeypatch.setattr(engine, "recorder_folder", lambda: tmp_path / "file")
        recorder.dump_record()
        assert "the experts on the GPU of 1 passes are lost: " in caplog.text
        assert "choose a folder, this is none" in caplog.text


class TestMaskRecord:
    A, B = torch.eye(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)

    def test_equal_masks_are_kept_once(self):
        kept = MaskRecord(2, 4, 1000)
        for masks in (self.A, self.A, self.A.clone(), self.B, self.A):
            kept.append(masks)
        assert [count for _, count in kept._runs] == [3, 1, 1]
        assert torch.equal(kept.masks(), torch.stack([self.A] * 3 + [self.B, self.A]))

    @pytest.mark.parametrize("bound", ["--expert-distribution-recorder-buffer-size", "GB of masks; dump more often"])
    def test_the_oldest_are_dropped_with_a_word(self, bound, monkeypatch, caplog):
        if not bound.startswith("--"):
            monkeypatch.setattr(record, "MOST_BYTES", 3 * 8 + 7)
        kept = MaskRecord(2, 4, 3 if bound.startswith("--") else -1)
        for masks in (self.A, self.A, self.B):
            kept.append(masks)
        assert caplog.text == ""
        for _ in range(2):
            kept.append(self.B)
        assert torch.equal(kept.masks(), torch.stack([self.B] * 3))
        assert kept.passes == 3
        assert caplog.text.count("--record-kt-gpu-expert-distribution keeps the last 3 passes") == 1
        assert bound in caplog.text
        kept.clear()
        assert kept.masks().shape == (0, 2, 4)

    def test_a_file_is_whole_or_not_there(self, tmp_path, monkeypatch):
        kept = MaskRecord(2, 4, 1000)
        kept.append(self.A)

        def break_off(_, stream):
            stream.write(b"half")
            raise RuntimeError("write failed")

        monkeypatch.setattr(torch, "save", break_off)
        with pytest.raises(RuntimeError, match="write failed"):
            kept.write(tmp_path / "new")
        assert list((tmp_path / "new").iterdir()) == []


class TestResidents:
    def test_tables(self):
        here = Residents(torch.tensor([True, False, False, True]))
        here.to(torch.device("cpu"))
        assert here.places(torch.tensor([[3, 1], [-1, 0]], dtype=torch.int32)).tolist() == [[1, -1], [-1, 0]]
        assert (here.place(3), here.place(2), here.others()) == (1, -1, [1, 2])

    @pytest.mark.parametrize(
        ("routed", "wanted"),
        [
            ([[1, 2], [2, 1]], [1, 2]),
            ([[2, 2], [1, 3]], [2, 3]),  # 1 and 3 are used alike: 3 is here
            ([[-1, -1], [4, 9]], [0, 3]),  # nobody's
            ([[2, -1], [-1, -1]], [0, 2]),  # 0 and 3 are here: the smaller id
        ],
    )
    def test_most_used(self, routed, wanted):
        here = Residents(torch.tensor([True, False, False, True]))
        here.to(torch.device("cpu"))
        assert here.most_used(torch.tensor(routed)).tolist() == wanted

    def test_tensors_of_a_graph_stay_where_they_are(self):
        here = Residents(torch.tensor([True, False, False, True]))
        here.to(torch.device("cpu"))
        places = here.table.data_ptr(), here.device_ids.data_ptr()
        here.move(torch.tensor([1, 2]))
        here.move_on_host([1, 2])
        assert (here.table.data_ptr(), here.device_ids.data_ptr()) == places
        assert here.table.tolist() == [-1, 0, 1, -1, -1]
        assert here.mask.tolist() == [False, True, True, False]


def test_experts_that_a_checkpoint_has_in_one_tensor(model):
    layer = model(Options(kt_expert_placement_strategy="random"))[0]
    found = []
    whole = torch.arange(SHAPE.experts).view(-1, 1)
    layer._layer.quant_method = layer.method
    hooks._load_experts(lambda *args: found.append(args), layer._layer, "param", whole, "name", "w13")
    assert found[0][2].flatten().tolist() == layer.method.residents.ids
    assert found[0][3:] == ("name", "w13")


def test_layers_that_sglang_does_not_give_away_load_as_ever():
    found = []
    layer = SimpleNamespace(quant_method=object())
    hooks._load_expert(lambda *args, **named: found.append((args, named)), layer, param=1, expert_id=6)
    assert found == [((layer,), {"param": 1, "expert_id": 6})]
    hooks._load_experts(lambda *args: found.append(args), layer, 1, torch.ones(2, 2))
    assert torch.equal(found[1][2], torch.ones(2, 2))


def test_draft_models_stay_on_the_gpu(model, monkeypatch):
    model(Options())
    monkeypatch.setattr(engine, "in_draft_model", lambda: True)
    assert hooks._kt_config(None, SimpleNamespace(kt_weight_path="/m"), 0) is None
    assert hooks._kt_config(None, SimpleNamespace(kt_weight_path=None), 0) is None
