"""What the machine can do: the arithmetic between measured points, the cache, and short measurements of everything."""

import json
from dataclasses import replace

import pytest

from kt_kernel.machine import disk_speed, linears, probe, system
from kt_kernel.machine.decode_overhead import Heads, measure_decode_overhead
from kt_kernel.machine.facts import machine
from kt_kernel.machine.linears import measure_linear_call_us, measure_linears
from kt_kernel.machine.products import ROWS, EvenBatch, Products, measure_products
from kt_kernel.machine.torch_layer import TorchLayer, measure_sampling_us, measure_torch_layer

CURVE = Products(((1, 1.0), (4, 2.0), (16, 8.0)), 0.0)
HEADS = Heads(4, 2, 32, 8, 2)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0.5, 1.0), (1, 1.0), (2, 2**0.5), (4, 2.0), (8, 4.0), (16, 8.0), (32, 16.0), (160, 80.0)]
)
def test_between_and_beyond_the_points(rows, seconds):
    assert CURVE.seconds(rows, 1) == pytest.approx(seconds)
    assert CURVE.seconds(rows, 10) == pytest.approx(10 * seconds)


def test_torch_layers_add_up():
    layer = TorchLayer(layer_us=10, token_us=2, pair_us=0.5)
    assert layer.seconds(3, 4) == pytest.approx((10 + 3 * (2 + 4 * 0.5)) / 1e6)


@pytest.fixture(scope="module")
def pool():
    return probe._pool(1, None)


def test_products_grow_with_the_rows(pool):
    found = measure_products(pool, "int8", 256, 256, 0.2)
    assert tuple(rows for rows, _ in found.points) == ROWS
    seconds = [s for _, s in found.points]
    assert all(s > 0 for s in seconds)
    # 256 rows take at least 16 times as long as one on any CPU; on busy machines the others may swap places.
    assert seconds[-1] > 16 * seconds[0]
    assert found.pack_seconds > 0


def test_single_matrices(pool):
    matrices = ((64, 128), (64, 128), (128, 64))
    found = measure_linears(pool, "bf16", matrices, measure_linear_call_us(pool), 0.1)
    assert tuple(rows for rows, _ in found.points) == ROWS
    assert found.points[-1][1] > found.points[0][1] > 0


def test_large_matrices_are_cut(pool, monkeypatch):
    monkeypatch.setattr(linears, "_LONGEST_BYTES", 16 * 64 * 2)
    made = []
    make = linears._linear
    monkeypatch.setattr(linears, "_linear", lambda *arguments: made.append(arguments[2:]) or make(*arguments))
    assert measure_linears(pool, "int8", ((1000, 64),), 0.0, 0.01).points[0][1] > 0
    assert set(made) == {(16, 64)}


def test_every_expert_of_a_call_has_all_rows():
    from kt_kernel.bench.shapes import Shape

    batch = EvenBatch(Shape("x", 24, 8, 64, 64), 5, 4)
    assert batch._ids.shape == (6, 5, 8)
    assert (batch._ids[..., 4:] == -1).all()
    assert sorted({int(i) for i in batch._ids[..., :4].ravel()}) == list(range(24))
    assert batch.addresses(0) == batch.addresses(6) != batch.addresses(1)


def test_attention_costs_more_further_on(pool):
    found = measure_decode_overhead(pool, HEADS, 0.1)
    assert found.layer_us > 0
    assert found.key_us > 0


@pytest.mark.parametrize("value_dim", [32, 16])
def test_what_torch_does_in_a_layer(value_dim):
    found = measure_torch_layer(1, 64, HEADS, value_dim, 0.06)
    assert found.layer_us > 0
    assert found.pair_us > 0


def test_sampling():
    assert measure_sampling_us(1000, 0.01) > 0


def test_disks(tmp_path):
    missing = tmp_path / "not" / "there"
    assert disk_speed.existing(missing) == tmp_path
    assert disk_speed.measure_disk_gbps(missing, 0.02) > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "model.safetensors").write_bytes(bytes(33 << 20))
    assert disk_speed.measure_disk_gbps(tmp_path, 0.02) > 0


def test_a_disk_that_cannot_be_written_to_is_not_known(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError("read-only")

    monkeypatch.setattr(disk_speed.tempfile, "NamedTemporaryFile", refuse)
    assert disk_speed.measure_disk_gbps(tmp_path, 0.02) is None


class Counted:
    def __init__(self, value):
        self.value, self.calls = value, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.value


@pytest.fixture
def counted(monkeypatch):
    measure = Counted(12.5)
    monkeypatch.setattr(probe._core, "measure_read_bandwidth", measure)
    monkeypatch.setattr(system, "busy_share", lambda seconds: 0.0)
    return measure


def test_measurements_are_kept(tmp_path, counted):
    said = []
    first = probe.Probe(threads=1, folder=tmp_path, say=said.append)
    assert first.oldest is None
    assert [first.read_gbps(), first.read_gbps()] == [12.5, 12.5]
    assert said == ["memory bandwidth"]
    again = probe.Probe(threads=1, folder=tmp_path)
    assert again.read_gbps() == 12.5
    assert (counted.calls, again.measured_s) == (1, 0.0)
    assert again.oldest is not None
    assert probe.Probe(threads=1, folder=tmp_path, fresh=True).read_gbps() == 12.5
    assert counted.calls == 2


def test_another_machine_measures_for_itself(tmp_path, counted):
    here = machine()
    probe.Probe(here, 1, folder=tmp_path).read_gbps()
    probe.Probe(replace(here, cpu="another"), 1, folder=tmp_path).read_gbps()
    probe.Probe(here, 2, folder=tmp_path).read_gbps()
    assert counted.calls == 3
    assert len(list((tmp_path / "probe").iterdir())) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"identity": 1, "measured": {}}', '{"measured": {"read": 1}}'])
def test_a_damaged_cache_is_measured_again(tmp_path, counted, damage):
    probe.Probe(threads=1, folder=tmp_path).read_gbps()
    [file] = (tmp_path / "probe").iterdir()
    file.write_text(damage)
    probe.Probe(threads=1, folder=tmp_path).read_gbps()
    assert counted.calls == 2
    assert json.loads(file.read_text())["measured"]["read"]["value"] == 12.5


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, counted):
    (tmp_path / "probe").write_text("a file")
    assert probe.Probe(threads=1, folder=tmp_path).read_gbps() == 12.5


def test_what_was_measured_on_a_busy_machine_is_measured_again(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(system, "busy_share", lambda seconds: 0.8)
    busy = probe.Probe(threads=1, folder=tmp_path)
    busy.read_gbps()
    assert busy.busy == 0.8
    probe.Probe(threads=1, folder=tmp_path).read_gbps()
    assert counted.calls == 1  # it is no better now
    monkeypatch.setattr(system, "busy_share", lambda seconds: 0.05)
    quiet = probe.Probe(threads=1, folder=tmp_path)
    quiet.read_gbps()
    assert (counted.calls, quiet.busy) == (2, 0.05)


def test_nodes_are_measured_one_by_one(tmp_path, counted, monkeypatch):
    here = machine()
    node = here.nodes[0]
    two = replace(here, nodes=(node, replace(node, id=node.id + 1)))
    pools = []
    monkeypatch.setattr(probe, "_pool", lambda threads, nodes: pools.append(nodes))
    found = probe.Probe(two, 1, folder=tmp_path).node_read_gbps()
    assert found == {node.id: 12.5, node.id + 1: 12.5}
    assert pools == [[node.id], [node.id + 1]]


def test_the_probe_of_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(probe, "FORMATS", ("int8",))
    rates = probe.probe(0.5, threads=1)
    assert rates.threads == 1
    assert rates.read_gbps > 0
    assert rates.node_read_gbps
    assert rates.peaks["fma_f32"] > 0
    assert set(rates.products) == {"int8"}
    assert rates.disk_gbps > 0
