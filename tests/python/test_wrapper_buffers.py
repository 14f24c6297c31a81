"""What all wrappers share: capture sizes, cleared buffers; and the choice of experts for the GPU."""

import pytest
from wrapper_cases import SHAPE, batch, loaded, same_bits, torch

from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks


class TestCaptureSizes:
    @pytest.fixture(autouse=True)
    def keep(self):
        before = KTMoEWrapper.get_capture_batch_sizes()
        yield
        KTMoEWrapper.set_capture_batch_sizes(before)

    @pytest.mark.parametrize("given", [[1, 2, 4, 8, 16], (3, 1), [], range(1, 4), torch.tensor([1, 7])])
    def test_they_are_kept_as_ints(self, given):
        KTMoEWrapper.set_capture_batch_sizes(given)
        sizes = KTMoEWrapper.get_capture_batch_sizes()
        assert sizes == [int(size) for size in given]
        assert all(type(size) is int for size in sizes)

    def test_the_list_is_a_copy(self):
        given = [1, 2]
        KTMoEWrapper.set_capture_batch_sizes(given)
        given.append(3)
        KTMoEWrapper.get_capture_batch_sizes().append(4)
        assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2]

    @pytest.mark.parametrize(
        ("given", "kind"),
        [
            ([0], ValueError),
            ([4, -1], ValueError),
            (["8"], TypeError),
            ([1.5], TypeError),
            (8, TypeError),
            (None, TypeError),
        ],
    )
    def test_what_is_refused_changes_nothing(self, given, kind):
        KTMoEWrapper.set_capture_batch_sizes([5])
        with pytest.raises(kind, match="capture_bs"):
            KTMoEWrapper.set_capture_batch_sizes(given)
        assert KTMoEWrapper.get_capture_batch_sizes() == [5]

    def test_instances_have_them_too(self):
        wrapper = loaded()
        wrapper.set_capture_batch_sizes([9])
        assert KTMoEWrapper.get_capture_batch_sizes() == wrapper.get_capture_batch_sizes() == [9]


class TestClearing:
    def test_memory_of_finished_calls_is_freed(self):
        wrapper, tokens = loaded(weight_path="/cleared"), batch(SHAPE, 40)
        expected = wrapper.forward(*tokens)
        assert wrapper._model.session.stages == 1
        wrapper.cpu_infer.sync()  # a result is there a moment before its call has ended
        KTMoEWrapper.clear_buffer_cache()
        assert wrapper._model.session.stages == 0
        assert same_bits(wrapper.forward(*tokens), expected)

    def test_a_call_in_flight_keeps_its_memory(self):
        wrapper, tokens = loaded(weight_path="/cleared"), batch(SHAPE, 40)
        expected = wrapper.forward(*tokens)
        wrapper.submit_forward(*tokens)
        for _ in range(3):
            KTMoEWrapper.clear_buffer_cache()
        assert wrapper._model.session.stages == 1
        assert same_bits(wrapper.sync_forward(tokens[0]), expected)

    def test_memory_is_used_again(self):
        """Any number of calls, in sizes that fit: one buffer."""
        wrapper = loaded(weight_path="/cleared")
        for tokens in (16, 9, 1, 5, 16):
            wrapper.forward(*batch(SHAPE, tokens))
            wrapper.cpu_infer.sync()
        assert wrapper._model.session.stages == 1


class TestMasks:
    FREQUENCIES = torch.tensor([[5.0, 1.0, 9.0, 3.0], [2.0, 8.0, 0.0, 7.0]])

    def test_the_most_used_of_all_layers(self):
        masks = generate_gpu_experts_masks(self.FREQUENCIES, 3)
        assert masks.tolist() == [[False, False, True, False], [False, True, False, True]]

    @pytest.mark.parametrize(("count", "total"), [(0, 0), (-3, 0), (1, 1), (8, 8), (9, 8), (1000, 8)])
    def test_the_number_is_clamped(self, count, total):
        masks = generate_gpu_experts_masks(self.FREQUENCIES, count)
        assert int(masks.sum()) == total

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.bfloat16, torch.float64])
    def test_any_type(self, dtype):
        masks = generate_gpu_experts_masks(self.FREQUENCIES.to(dtype), 3)
        assert (masks.dtype, masks.device.type, tuple(masks.shape)) == (torch.bool, "cpu", (2, 4))
        assert torch.equal(masks, generate_gpu_experts_masks(self.FREQUENCIES, 3))

    def test_large_counts_are_compared_exactly(self):
        counts = torch.tensor([[(1 << 40) + 1, (1 << 40) + 3, (1 << 40) + 2]])
        assert generate_gpu_experts_masks(counts, 1).tolist() == [[False, True, False]]

    def test_among_equals_the_earlier_wins(self):
        masks = generate_gpu_experts_masks(torch.ones(3, 5), 7)
        assert masks.flatten().tolist() == [True] * 7 + [False] * 8
        some = torch.tensor([[1, 2, 1], [2, 1, 2]])
        assert generate_gpu_experts_masks(some, 4).tolist() == [[True, True, False], [True, False, True]]

    def test_many_equals(self):
        counts = torch.randint(0, 3, (40, 256), generator=torch.Generator().manual_seed(0))
        order = sorted(range(counts.numel()), key=lambda place: (-int(counts.flatten()[place]), place))
        chosen = generate_gpu_experts_masks(counts, 5000).flatten().nonzero().flatten().tolist()
        assert chosen == sorted(order[:5000])

    def test_a_view_is_read_right_and_not_changed(self):
        turned = self.FREQUENCIES.T.contiguous().T
        before = turned.clone()
        assert torch.equal(generate_gpu_experts_masks(turned, 3), generate_gpu_experts_masks(self.FREQUENCIES, 3))
        assert torch.equal(turned, before)

    def test_under_another_default_device(self):
        with torch.device("meta"):
            assert generate_gpu_experts_masks(self.FREQUENCIES, 3).device.type == "cpu"

    @pytest.mark.parametrize("shape", [(4,), (1, 2, 4), ()])
    def test_other_shapes_are_refused(self, shape):
        with pytest.raises(ValueError, match=r"activation_freq has shape .* it must be \[layers, experts\]"):
            generate_gpu_experts_masks(torch.zeros(shape), 1)

    def test_a_row_is_the_mask_of_a_wrapper(self):
        masks = generate_gpu_experts_masks(torch.arange(12).reshape(2, 6), 4)
        wrapper = loaded(gpu_experts_mask=masks[1])
        assert wrapper.num_gpu_experts == 4
