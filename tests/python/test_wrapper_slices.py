"""submit_write_weight_scale_to_buffer: every rank of a GPU gets its bytes of the checkpoint."""

import numpy as np
import pytest
from slice_cases import FORMATS, Buffers, Experts, assert_slices
from wrapper_cases import SHAPE, batch, loaded, make, same_bits, tensors, torch

from kt_kernel import KTMoEWrapper, _core, kt_kernel_ext
from kt_kernel.methods import METHODS

COUNTS = [1, 2, 3, 4, 8]
# (hidden, intermediate): parts of 60 to 480 columns, which share blocks and groups; of 384 and more, which share none.
SIZES = {"shared": (200, 480), "whole": (256, 3072)}


def wrapper_with(experts: Experts, subpools: int = 1, logical_ids=None, **options) -> KTMoEWrapper:
    """A wrapper whose layer has the bytes of ``experts``."""
    wrapper = KTMoEWrapper(
        layer_idx=0,
        num_experts=len(experts.all),
        num_experts_per_tok=1,
        hidden_size=experts.hidden,
        moe_intermediate_size=experts.intermediate,
        cpuinfer_threads=max(2, subpools),
        threadpool_count=subpools,
        method="BF16",
        **options,
    )
    wrapper._layer = wrapper.moe = experts.layer(wrapper._runtime.pool, logical_ids)
    return wrapper


def write(wrapper: KTMoEWrapper, ranks: int, expert: int) -> Buffers:
    buffers = Buffers(wrapper.moe, ranks, expert)
    wrapper.submit_write_weight_scale_to_buffer(ranks, expert, *buffers.pointers())
    wrapper.sync_write_weight_scale_to_buffer()
    return buffers


@pytest.mark.parametrize("subpools", COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_rank_gets_its_bytes(weight_format, sizes, subpools):
    experts = Experts(weight_format, 2, *SIZES[sizes])
    wrapper = wrapper_with(experts, subpools)
    for ranks in COUNTS:
        assert_slices(write(wrapper, ranks, 1), experts, 1)


def test_the_formats():
    assert FORMATS == ["bf16", "fp8", "fp8c", "mxfp8", "mxfp4", "rawint4"]


class TestSizes:
    def test_as_gpus_have_them(self):
        """Parts of whole blocks: [2n, H] and [2n / 128, H / 128], [H, n] and [H / 128, n / 128]."""
        layer = wrapper_with(Experts("fp8", 1, 256, 1024)).moe
        assert layer.slice_bytes(4) == [(2 * 256 * 256, 4 * 2 * 2 * 2, 256 * 256, 4 * 2 * 2)] * 4
        layer = wrapper_with(Experts("fp8c", 1, 256, 1024)).moe
        assert layer.slice_bytes(2) == [(2 * 512 * 256, 4 * 2 * 512, 256 * 512, 4 * 256)] * 2
        layer = wrapper_with(Experts("mxfp4", 1, 256, 1024)).moe
        assert layer.slice_bytes(2) == [(2 * 512 * 128, 2 * 2 * 512 * 8, 256 * 256, 2 * 256 * 16)] * 2

    def test_a_scale_of_two_ranks_goes_to_both(self):
        """Parts of 96 rows and blocks of 128: rows 0..95 are of block 0, rows 96..191 of blocks 0 and 1."""
        layer = wrapper_with(Experts("fp8", 1, 128, 192)).moe
        assert [sizes[1] for sizes in layer.slice_bytes(2)] == [4 * 2 * 1, 4 * 2 * 2]
        assert [sizes[3] for sizes in layer.slice_bytes(2)] == [4 * 1, 4 * 2]

    def test_random_weights_have_those_of_a_checkpoint(self):
        pool = _core.Pool([1])
        for weight_format in FORMATS:
            layer = Experts(weight_format, 1, 256, 512).layer(pool)
            wanted = layer.slice_bytes(2)
            layer.fill_random(1)
            assert layer.slice_bytes(2) == wanted


class TestExperts:
    @pytest.mark.parametrize("weight_format", ["bf16", "fp8"])
    def test_ids_are_physical(self, weight_format):
        experts, logical = Experts(weight_format, 4, 128, 128), [2, 0, 3, 1]
        wrapper = wrapper_with(experts, logical_ids=logical)
        for slot, expert in enumerate(logical):
            assert_slices(write(wrapper, 2, slot), experts, expert)

    def test_a_map_of_load_weights_from_tensors(self):
        wrapper, logical = make(), [5, 3, 1, 0, 2, 4]
        gate, up, down = tensors()
        wrapper.load_weights_from_tensors(gate, up, down, torch.tensor(logical))
        part = SHAPE.intermediate // 2
        for slot, expert in enumerate(logical):
            buffers = write(wrapper, 2, slot)
            for rank in range(2):
                mine = slice(rank * part, (rank + 1) * part)
                w13 = torch.cat([gate[expert, mine], up[expert, mine]])
                assert buffers.written(rank)["w13_weight"] == w13.view(torch.int16).numpy().tobytes()
                w2 = down[expert][:, mine].contiguous()
                assert buffers.written(rank)["w2_weight"] == w2.view(torch.int16).numpy().tobytes()

    def test_the_mask_does_not_matter(self):
        experts = Experts("fp8", 3, 128, 256)
        wrapper = wrapper_with(experts, num_gpu_experts=2)
        for expert in range(3):
            assert_slices(write(wrapper, 2, expert), experts, expert)

    def test_one_that_was_not_loaded(self):
        wrapper = make(num_gpu_experts=2, skip_gpu_experts=True)
        wrapper.load_weights_from_tensors(*tensors())
        wrapper.submit_write_weight_scale_to_buffer(1, 1, *Buffers(wrapper.moe, 1).pointers())
        with pytest.raises(ValueError, match="expert 1 of this layer has no weights"):
            wrapper.sync_write_weight_scale_to_buffer()
        wrapper.sync_write_weight_scale_to_buffer()
        write(wrapper, 1, 2)


class TestPackedFiles:
    def test_rows_that_share_a_scale_are_kept_beside_them(self, tmp_path):
        experts, pool = Experts("fp8", 2, 200, 480), _core.Pool([1, 1])
        first, second = experts.layer(pool), Experts("fp8", 2, 200, 480, seed=1).layer(pool)
        assert first.scale_rows(1) == (128, 128, 128)
        with open(tmp_path / "packed", "w+b") as file:
            place = (file.fileno(), file.name, 0, 2, [(0, 0), (1, 1)])
            second.read_packed(*place, first.write_packed(*place))
        with pytest.raises(ValueError, match="how many rows of expert 1 share a scale is not known"):
            second.slice_bytes(2, 1)
        second.set_scale_rows(1, *first.scale_rows(1))
        buffers, queue = Buffers(second, 3, 1), _core.Queue(pool)
        queue.submit(_core.WriteSlicesTask(second, 3, 1, *buffers.pointers()))
        queue.sync()
        assert_slices(buffers, experts, 1)
        queue.submit(_core.WriteSlicesTask(second, 3, 0, *buffers.pointers()))
        with pytest.raises(ValueError, match="how many rows of expert 0"):
            queue.sync()

    def test_wrong_numbers(self):
        layer = Experts("fp8", 1, 64, 64).layer(_core.Pool([1]))
        with pytest.raises(ValueError, match="expert 1 is not in"):
            layer.set_scale_rows(1, 1, 1, 1)
        with pytest.raises(ValueError, match="at least 1 row"):
            layer.set_scale_rows(0, 1, 0, 1)


class TestOrder:
    def test_many_before_one_sync(self):
        experts = Experts("mxfp8", 6, 128, 256)
        wrapper = wrapper_with(experts, 2)
        all_buffers = [Buffers(wrapper.moe, 2) for _ in experts.all]
        for expert, buffers in enumerate(all_buffers):
            wrapper.submit_write_weight_scale_to_buffer(2, expert, *buffers.pointers())
        wrapper.sync_write_weight_scale_to_buffer()
        for expert, buffers in enumerate(all_buffers):
            assert_slices(buffers, experts, expert)

    def test_a_sync_that_leaves_the_last_ones(self):
        experts = Experts("bf16", 4, 256, 480)
        wrapper = wrapper_with(experts)
        all_buffers = [Buffers(wrapper.moe, 2, expert) for expert in range(4)]
        for expert, buffers in enumerate(all_buffers):
            wrapper.submit_write_weight_scale_to_buffer(2, expert, *buffers.pointers())
        for expert, buffers in enumerate(all_buffers):
            wrapper.sync_write_weight_scale_to_buffer(allow_n_pending=3 - expert)
            assert_slices(buffers, experts, expert)
        with pytest.raises(ValueError, match="allow_n_pending=-1; pass 0 or more"):
            wrapper.sync_write_weight_scale_to_buffer(-1)

    def test_between_forwards(self):
        wrapper, (x, ids, weights) = loaded(), batch()
        wanted = wrapper.forward(x, ids, weights)
        buffers = Buffers(wrapper.moe, 2)
        wrapper.submit_forward(x, ids, weights)
        wrapper.submit_write_weight_scale_to_buffer(2, 0, *buffers.pointers())
        assert same_bits(wrapper.sync_forward(x), wanted)
        wrapper.sync_write_weight_scale_to_buffer()
        assert buffers.written(1) == write(wrapper, 2, 0).written(1)

    def test_weights_cannot_change_meanwhile(self):
        wrapper = loaded()
        wrapper.submit_write_weight_scale_to_buffer(1, 0, *(buffers := Buffers(wrapper.moe, 1)).pointers())
        with pytest.raises(RuntimeError, match="between submit_write_weight_scale_to_buffer and sync_write"):
            wrapper.load_weights_from_tensors(*tensors())
        wrapper.sync_write_weight_scale_to_buffer()
        wrapper.load_weights_from_tensors(*tensors(seed=1))
        assert buffers.written(0) != write(wrapper, 1, 0).written(0)

    @pytest.mark.parametrize("pool_stays", [True, False])
    def test_a_wrapper_may_go_while_it_writes(self, pool_stays):
        experts = Experts("bf16", 1, 256, 3072)
        for _ in range(5):
            wrapper = wrapper_with(experts, 5)  # a pool that no other test has
            buffers = [Buffers(wrapper.moe, 4) for _ in range(4)]
            for memory in buffers:
                wrapper.submit_write_weight_scale_to_buffer(4, 0, *memory.pointers())
            runtime = wrapper._runtime if pool_stays else None
            del wrapper
            if runtime:
                runtime.queue.sync()
            for memory in buffers:
                assert_slices(memory, experts, 0)
            del runtime

    def test_a_sync_without_a_submit(self):
        make().sync_write_weight_scale_to_buffer()


@pytest.fixture(scope="module")
def wrapper():
    return wrapper_with(Experts("rawint4", 2, 128, 192))


class TestErrors:
    def refused(self, wrapper, error, words, ranks=2, expert=0, **lists):
        names = ["w13_weight_ptrs", "w13_scale_ptrs", "w2_weight_ptrs", "w2_scale_ptrs"]
        pointers = dict(zip(names, Buffers(wrapper.moe, 2).pointers(), strict=True))
        with pytest.raises(error, match=words):
            wrapper.submit_write_weight_scale_to_buffer(ranks, expert, **{**pointers, **lists})

    @pytest.mark.parametrize("name", ["w13_weight_ptrs", "w13_scale_ptrs", "w2_weight_ptrs", "w2_scale_ptrs"])
    def test_lists(self, wrapper, name):
        for count in (0, 1, 3):
            words = f"{name} has {count} addresses; gpu_tp_count is 2"
            self.refused(wrapper, ValueError, words, **{name: [4096] * count})
        self.refused(wrapper, ValueError, rf"{name}\[1\]=0; pass the address", **{name: [4096, 0]})
        self.refused(wrapper, ValueError, rf"{name}\[0\]=-1; pass the address", **{name: [-1, 4096]})
        for wrong in (None, 4096, [1.5, 2.5], ["a", "b"]):
            self.refused(wrapper, TypeError, f"{name}=.* pass a list of 2 addresses", **{name: wrong})

    @pytest.mark.parametrize("expert", [-1, 2, 1 << 40])
    def test_ids(self, wrapper, expert):
        self.refused(wrapper, ValueError, rf"expert_id={expert} is not in 0\.\.1", expert=expert)

    def test_kinds_of_numbers(self, wrapper):
        self.refused(wrapper, TypeError, "expert_id='0' is a str", expert="0")
        self.refused(wrapper, TypeError, "gpu_tp_count=2.0 is a float", ranks=2.0)
        buffers = Buffers(wrapper.moe, 2)
        pointers = [np.array(addresses) for addresses in buffers.pointers()]
        wrapper.submit_write_weight_scale_to_buffer(np.int64(2), torch.tensor(1), *pointers)
        wrapper.sync_write_weight_scale_to_buffer()

    @pytest.mark.parametrize("ranks", [0, -1])
    def test_no_ranks(self, wrapper, ranks):
        self.refused(wrapper, ValueError, f"gpu_tp_count={ranks}; pass 1 or more", ranks=ranks)

    def test_ranks_that_do_not_divide(self, wrapper):
        lists = {name: [4096] * 5 for name in ("w13_weight_ptrs", "w13_scale_ptrs", "w2_weight_ptrs", "w2_scale_ptrs")}
        words = "gpu_tp_count=5: moe_intermediate_size 192 cannot be cut into 5 equal .* into 1, 2, 3, 4, 6, 8, 12, 16"
        self.refused(wrapper, ValueError, words, ranks=5, **lists)
        with pytest.raises(ValueError, match=r"cannot be cut into 64 equal parts of whole bytes"):
            wrapper.submit_write_weight_scale_to_buffer(64, 0, *[[4096] * 64] * 4)

    def test_no_weights(self):
        with pytest.raises(RuntimeError, match=r"layer 0 has no weights; call load_weights\(\)"):
            make().submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])

    @pytest.mark.parametrize("method", [name for name in METHODS if not _core.has_slices(METHODS[name])])
    def test_methods_without_the_bytes(self, method):
        wrapper = make(method=method)
        wrapper.load_random_weights(0)
        with pytest.raises(NotImplementedError, match=r"methods that can are BF16"):
            wrapper.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])

    @pytest.mark.parametrize("scales", [[0, 0], [], None])
    def test_bf16_ignores_addresses_of_scales(self, scales):
        wrapper = loaded()
        w13, _, w2, _ = (buffers := Buffers(wrapper.moe, 2)).pointers()
        wrapper.submit_write_weight_scale_to_buffer(2, 0, w13, scales, w2, scales)
        wrapper.sync_write_weight_scale_to_buffer()
        assert buffers.written(0) == write(wrapper, 2, 0).written(0)


def test_tasks_of_the_older_module():
    experts = Experts("bf16", 2, 128, 192)
    cpu_infer = kt_kernel_ext.CPUInfer(2)
    config = kt_kernel_ext.moe.MOEConfig(2, 1, 128, 192)
    config.max_len, config.pool = 4, cpu_infer.backend_
    arrays = [np.stack([expert[i].codes for expert in experts.all]) for i in range(3)]
    config.gate_proj, config.up_proj, config.down_proj = (array.ctypes.data for array in arrays)
    layer = kt_kernel_ext.moe.AMXBF16_MOE(config)
    cpu_infer.submit(layer.load_weights_task())
    buffers = Buffers(layer._layer, 3)
    cpu_infer.submit(layer.write_weight_scale_to_buffer_task(3, 1, *buffers.pointers()))
    cpu_infer.sync()
    assert_slices(buffers, experts, 1)
    with pytest.raises(NotImplementedError, match="methods that can are BF16"):
        kt_kernel_ext.moe.AMXInt8_MOE(config).write_weight_scale_to_buffer_task(1, 0, [1], [1], [1], [1])
