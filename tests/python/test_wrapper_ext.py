"""kt_kernel_ext: pools, queues and layers on addresses, under the names of the older native module."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from layer_limits import FORMATS
from layer_reference import Case, Shape, random_batch, random_expert

import kt_kernel
from kt_kernel import _core, kt_kernel_ext
from kt_kernel.kt_kernel_ext import CPUInfer, WorkerPoolConfig, moe
from kt_kernel.methods import KEPT_FORMATS

SHAPE = Shape(experts=5, top_k=2, hidden=72, intermediate=130)
CLASSES = {
    "AMXBF16_MOE": "bf16",
    "AVX2BF16_MOE": "bf16",
    "AMXInt8_MOE": "int8",
    "Int8_KERNEL_MOE": "int8",
    "AMXInt4_MOE": "int4",
    "Int4_KERNEL_MOE": "int4",
    "AMXInt4_1KGroup_MOE": "int4g",
}
MAX_LEN = 16


class Weights:
    """The tensors of all experts, alive as long as their addresses are used."""

    def __init__(self, seed: int = 0):
        experts = [random_expert(SHAPE, seed, expert) for expert in range(SHAPE.experts)]
        self.gate, self.up, self.down = (np.stack(parts) for parts in zip(*experts, strict=True))

    def into(self, config: moe.MOEConfig, one_by_one: bool = False) -> None:
        for name in ("gate", "up", "down"):
            array = getattr(self, name)
            if one_by_one:
                setattr(config, f"{name}_projs", [[part.ctypes.data for part in array]])
            else:
                setattr(config, f"{name}_proj", array.ctypes.data)


class Call:
    """A batch, and a result that shows what was not written."""

    def __init__(self, tokens: int, seed: int = 0):
        self.x, self.ids, self.weights = random_batch(SHAPE, tokens, seed)
        self.out = np.full(self.x.shape, 0x7FC0, np.uint16)
        self.tokens = np.array([tokens], np.int32)

    def task(self, layer, incremental: bool = False) -> "_core.ForwardTask":
        arrays = (self.ids, self.weights, self.x, self.out)
        addresses = [array.ctypes.data for array in arrays]
        return layer.forward_task(self.tokens.ctypes.data, SHAPE.top_k, *addresses, incremental)


@pytest.fixture(scope="module")
def cpu_infer():
    return CPUInfer(2)


def make(cpu_infer, *placement, name: str = "AMXInt8_MOE", seed: int = 0, one_by_one: bool = False, **fields):
    """A loaded layer; its weights are packed, so their tensors may go."""
    config = moe.MOEConfig(SHAPE.experts, SHAPE.top_k, SHAPE.hidden, SHAPE.intermediate, *placement)
    config.max_len, config.pool = MAX_LEN, cpu_infer.backend_
    for field, value in fields.items():
        setattr(config, field, value)
    weights = Weights(seed)
    weights.into(config, one_by_one)
    layer = getattr(moe, name)(config)
    cpu_infer.submit(layer.load_weights_task())
    cpu_infer.submit(layer.warm_up_task())
    cpu_infer.sync()
    return layer


def run(cpu_infer, layer, call: Call) -> np.ndarray:
    cpu_infer.submit(call.task(layer))
    cpu_infer.sync()
    return call.out.copy()


def expected(call: Call, weight_format: str = "int8", seed: int = 0) -> np.ndarray:
    return Case(SHAPE, weight_format, threads=(2,), seed=seed).run(call.x, call.ids, call.weights)


class TestNames:
    def test_in_a_fresh_process(self):
        code = """
import kt_kernel
import kt_kernel_ext
from kt_kernel_ext.moe import MOEConfig, AMXInt8_MOE
from kt_kernel_ext.kvcache import ggml_type
from kt_kernel_ext import CPUInfer, WorkerPoolConfig
import sys
assert kt_kernel_ext is kt_kernel.kt_kernel_ext
assert ggml_type.BF16 == 30 and ggml_type.FP32 == 0 and ggml_type.FP16 == 1
assert kt_kernel_ext.moe.MOEConfig is MOEConfig
print(*({"torch", "numpy"} & set(sys.modules)))
"""
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "", "")

    def test_there_is_a_class_for_every_format(self):
        assert set(CLASSES.values()) == set(FORMATS) - KEPT_FORMATS  # those take bf16
        assert {name: getattr(moe, name).format for name in CLASSES} == CLASSES

    def test_streams_are_offered_only_with_a_driver(self, cpu_infer):
        present = _core.cuda_missing() is None
        for name in ("submit_with_cuda_stream", "sync_with_cuda_stream"):
            assert hasattr(cpu_infer, name) == present
        assert not hasattr(cpu_infer, "no_such_name")
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = cpu_infer.no_such_name

    def test_a_wrapper_shows_its_own(self):
        pytest.importorskip("torch")
        wrapper = kt_kernel.KTMoEWrapper(0, 2, 1, 64, 64, cpuinfer_threads=2, threadpool_count=1)
        assert isinstance(wrapper.cpu_infer, CPUInfer)
        assert wrapper.cpu_infer.backend_ is wrapper._runtime


class TestPools:
    def test_sizes_and_places_of_subpools(self):
        config = WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 2, [0, 0], [1, 1]
        assert CPUInfer(config).backend_.plan.threads == (1, 1)

    def test_sizes_need_not_be_equal(self, monkeypatch):
        """On a node of four CPUs, which here are one that is listed four times."""
        cpu = _core.topology().nodes[0].cpus[0]
        node = SimpleNamespace(id=0, memory_id=_core.topology().nodes[0].memory_id, cpus=[cpu] * 4, physical_cores=4)
        monkeypatch.setattr(_core, "topology", lambda: SimpleNamespace(nodes=[node]))
        assert CPUInfer(WorkerPoolConfig(2, [0, 0], [1, 3])).backend_.pool.threads == 4
        assert CPUInfer(WorkerPoolConfig(2, [0, 0], [1, 3])).backend_.plan.threads == (1, 3)

    def test_results_with_subpools(self):
        pools = CPUInfer(WorkerPoolConfig(2, [0, 0], [1, 1]))
        call = Call(9)
        out = run(pools, make(pools, name="AMXBF16_MOE"), call)
        case = Case(SHAPE, "bf16", threads=(1, 1))
        assert np.array_equal(out, case.run(call.x, call.ids, call.weights))

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            (WorkerPoolConfig(2, [0], [1, 1]), "subpool_count is 2, subpool_numa_map has 1"),
            (WorkerPoolConfig(1, [0], [1, 1]), "subpool_thread_count 2"),
            (WorkerPoolConfig(1, [4096], [1]), "no CPUs on"),
            (WorkerPoolConfig(2, [0, 0], [1, 0]), "threads of a sub-pool=0; pass 1 or more"),
            (WorkerPoolConfig(0, [], []), "1 or more"),
            (0, "1 or more"),
            (-1, "1 or more"),
        ],
    )
    def test_what_is_refused(self, config, words):
        with pytest.raises(ValueError, match=words):
            CPUInfer(config)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_numbers(cpu_infer, name, one_by_one):
    layer = make(cpu_infer, name=name, one_by_one=one_by_one)
    for tokens in (1, 9, MAX_LEN):
        call = Call(tokens)
        assert np.array_equal(run(cpu_infer, layer, call), expected(call, CLASSES[name]))


class TestTasks:
    def test_the_number_of_tokens_is_read_when_it_runs(self, cpu_infer):
        layer, call = make(cpu_infer), Call(9)
        task = call.task(layer)
        call.tokens[0] = 4
        cpu_infer.submit(task)
        cpu_infer.sync()
        assert np.array_equal(call.out[:4], expected(Call(9))[:4])
        assert (call.out[4:] == 0x7FC0).all()

    def test_an_error_is_raised_once_at_sync_and_the_queue_goes_on(self, cpu_infer):
        layer, wrong, right = make(cpu_infer), Call(9), Call(9)
        wrong.tokens[0] = MAX_LEN + 1
        cpu_infer.submit(wrong.task(layer))
        cpu_infer.submit(right.task(layer))
        with pytest.raises(ValueError, match=f"{MAX_LEN + 1} tokens in one call; .* at most {MAX_LEN}"):
            cpu_infer.sync()
        assert np.array_equal(right.out, expected(right))
        assert (wrong.out == 0x7FC0).all()
        cpu_infer.sync()

    @pytest.mark.parametrize("tokens", [-1, 0])
    def test_no_tokens(self, cpu_infer, tokens):
        layer, call = make(cpu_infer), Call(1)
        call.tokens[0] = tokens
        cpu_infer.submit(call.task(layer))
        if tokens < 0:
            with pytest.raises(ValueError, match="-1 tokens"):
                cpu_infer.sync()
        else:
            cpu_infer.sync()
        assert (call.out == 0x7FC0).all()

    def test_another_number_of_experts_per_token(self, cpu_infer):
        layer, call = make(cpu_infer), Call(3)
        addresses = [array.ctypes.data for array in (call.ids, call.weights, call.x, call.out)]
        cpu_infer.submit(layer.forward_task(call.tokens.ctypes.data, 3, *addresses))
        with pytest.raises(ValueError, match=f"k = 3; this layer has {SHAPE.top_k}"):
            cpu_infer.sync()

    def test_many_in_order_and_some_left(self, cpu_infer):
        """The second of two adds to what the first wrote."""
        layer, call = make(cpu_infer), Call(9)
        for _ in range(20):
            cpu_infer.submit(call.task(layer))
            cpu_infer.submit(call.task(layer, incremental=True))
        cpu_infer.sync(3)
        assert cpu_infer.backend_.queue.pending <= 3
        cpu_infer.sync()
        once = Case(SHAPE, "int8", threads=(2,))
        assert np.array_equal(call.out, once.run(call.x, call.ids, call.weights, onto=expected(call)))

    def test_a_layer_may_go_while_its_task_waits(self, cpu_infer):
        calls = [Call(MAX_LEN, seed) for seed in range(50)]
        for call in calls:
            cpu_infer.submit(call.task(make_unsynced(cpu_infer)))
        cpu_infer.sync()
        assert all(np.array_equal(call.out, expected(call)) for call in calls[::10])

    def test_a_load_comes_after_the_forwards_before_it(self, cpu_infer):
        layer = make(cpu_infer)
        calls = [Call(MAX_LEN, seed) for seed in range(30)]
        for call in calls:
            cpu_infer.submit(call.task(layer))
        other = Weights(seed=1)
        other.into(layer._config)
        cpu_infer.submit(layer.load_weights_task())
        after = Call(MAX_LEN, 3)
        cpu_infer.submit(after.task(layer))
        cpu_infer.sync()
        assert np.array_equal(calls[29].out, expected(calls[29]))
        assert np.array_equal(after.out, expected(after, seed=1))

    def test_directly(self, cpu_infer):
        layer, call = make(cpu_infer), Call(9)
        addresses = [array.ctypes.data for array in (call.ids, call.weights, call.x, call.out)]
        layer.warm_up()
        layer.forward(call.tokens.ctypes.data, SHAPE.top_k, *addresses)
        assert np.array_equal(call.out, expected(call))


def make_unsynced(cpu_infer):
    config = moe.MOEConfig(SHAPE.experts, SHAPE.top_k, SHAPE.hidden, SHAPE.intermediate)
    config.max_len, config.pool = MAX_LEN, cpu_infer.backend_
    weights = Weights()
    weights.into(config)
    layer = moe.AMXInt8_MOE(config)
    layer.load_weights()
    return layer


class TestPlacement:
    def without(self, call: Call, *experts: int) -> np.ndarray:
        ids = np.where(np.isin(call.ids, experts), -1, call.ids)
        return Case(SHAPE, "int8", threads=(2,)).run(call.x, ids, call.weights)

    def test_a_count(self, cpu_infer):
        call = Call(9)
        assert moe.MOEConfig(5, 2, 72, 130, 3).num_gpu_experts == 3
        assert moe.MOEConfig(5, 2, 72, 130, 0x10000).gpu_experts_mask == 0x10000  # the lowest address there is
        assert np.array_equal(run(cpu_infer, make(cpu_infer, 3), call), self.without(call, 0, 1, 2))
        assert np.array_equal(run(cpu_infer, make(cpu_infer, num_gpu_experts=2), call), self.without(call, 0, 1))

    def test_an_address_is_read_at_every_call(self, cpu_infer):
        mask, call = np.zeros(SHAPE.experts, np.bool_), Call(9)
        for layer in (make(cpu_infer, mask.ctypes.data), make(cpu_infer, gpu_experts_mask=mask.ctypes.data)):
            assert layer._config.gpu_experts_mask == mask.ctypes.data
            for experts in ([], [1], [0, 4], range(5)):
                mask[:] = np.isin(np.arange(5), list(experts))
                assert np.array_equal(run(cpu_infer, layer, call), self.without(call, *experts))

    @pytest.mark.parametrize("count", [-1, 6])
    def test_a_count_that_cannot_be(self, cpu_infer, count):
        with pytest.raises(ValueError, match=rf"num_gpu_experts is {count}; it must be in 0\.\.5"):
            make(cpu_infer, count)


class TestLoads:
    MAP = np.array([4, 2, 0, 1, 3], np.int64)

    def test_a_map_in_the_task_or_in_the_configuration(self, cpu_infer):
        call = Call(9)
        mapped = Case(SHAPE, "int8", threads=(2,))
        for slot, expert in enumerate(self.MAP):
            mapped.layer.load_expert(slot, *mapped.original[expert])
        wanted = mapped.run(call.x, call.ids, call.weights)
        in_configuration = make(cpu_infer, physical_to_logical_map=self.MAP.ctypes.data)
        assert np.array_equal(run(cpu_infer, in_configuration, call), wanted)
        layer, weights = make(cpu_infer), Weights()
        weights.into(layer._config)
        cpu_infer.submit(layer.load_weights_task(self.MAP.ctypes.data))
        cpu_infer.sync()
        assert np.array_equal(run(cpu_infer, layer, call), wanted)

    @pytest.mark.parametrize("value", [-1, 5])
    def test_a_map_that_cannot_be(self, cpu_infer, value):
        wrong = np.array([0, 1, value, 3, 4], np.int64)
        with pytest.raises(ValueError, match=rf"physical_to_logical_map\[2\] is {value}; it must be in 0\.\.4"):
            make(cpu_infer, physical_to_logical_map=wrong.ctypes.data)

    def test_what_is_missing(self, cpu_infer):
        config = moe.MOEConfig(5, 2, 72, 130)
        with pytest.raises(ValueError, match=r"MOEConfig\.pool is not set"):
            moe.AMXInt8_MOE(config)
        config.pool = cpu_infer.backend_
        with pytest.raises(ValueError, match=r"MOEConfig\.max_len is 0"):
            moe.AMXInt8_MOE(config)
        config.max_len = 8
        layer = moe.AMXInt8_MOE(config)
        with pytest.raises(ValueError, match=r"neither MOEConfig\.gate_proj nor MOEConfig\.gate_projs"):
            cpu_infer.submit(layer.load_weights_task())
        config.gate_projs = [[1] * 5, [2] * 5]
        with pytest.raises(ValueError, match=r"MOEConfig\.gate_projs has 2 shards"):
            cpu_infer.submit(layer.load_weights_task())

    def test_a_forward_without_weights(self, cpu_infer):
        config = moe.MOEConfig(5, 2, 72, 130)
        config.pool, config.max_len = cpu_infer.backend_, 16
        cpu_infer.submit(Call(3).task(moe.AMXInt8_MOE(config)))
        with pytest.raises(ValueError, match="has no weights"):
            cpu_infer.sync()


def test_the_module_says_what_it_offers():
    assert set(kt_kernel_ext.__all__) <= set(dir(kt_kernel_ext))
