"""Files converted by kt-kernel 0.4 to 0.7: loaded as they are, or refused with the way out."""

import numpy as np
import pytest
from layer_reference import Shape
from weight_files import METHODS, ReleasedLayer, decoded, make_layer, same, write_safetensors

from kt_kernel.weights import MissingTensorError, load_layer

LAYER = 3
NODES = [(2,), (1, 1), (1, 1, 1), (1, 1, 1, 1)]


def shape_for(weight_format: str, parts: int, units: int = 1) -> Shape:
    unit = 64 if weight_format == "int8" else 128
    return Shape(experts=2, top_k=1, hidden=2 * unit, intermediate=parts * units * unit)


def write(kind: str, source: ReleasedLayer, folder):
    if kind == "tree":
        return source.write_tree(folder, LAYER)
    source.write_merged(folder / "model-00001.safetensors", LAYER, pad=3)
    return folder


@pytest.mark.parametrize("kind", ["merged", "tree"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_on_as_many_nodes_nothing_is_lost(weight_format, parts, kind, tmp_path):
    shape = shape_for(weight_format, parts)
    source = ReleasedLayer(shape, weight_format, parts)
    layer = make_layer(shape, weight_format, NODES[parts - 1])
    load_layer(layer, METHODS[weight_format], write(kind, source, tmp_path), LAYER)
    assert same(decoded(layer), source.meaning())


@pytest.mark.parametrize("threads", NODES)
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_one_part_fits_any_number_of_nodes(weight_format, threads, tmp_path):
    shape = shape_for(weight_format, 1, units=5)
    source = ReleasedLayer(shape, weight_format, 1)
    layer = make_layer(shape, weight_format, threads)
    load_layer(layer, METHODS[weight_format], write("merged", source, tmp_path), LAYER)
    assert same(decoded(layer), source.meaning())


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_two_parts_on_four_nodes_and_depths_beyond_a_block(weight_format, tmp_path):
    unit = 64 if weight_format == "int8" else 128
    shape = Shape(experts=1, top_k=1, hidden=3584 + unit, intermediate=4 * unit)
    source = ReleasedLayer(shape, weight_format, 2)
    layer = make_layer(shape, weight_format, NODES[3])
    load_layer(layer, METHODS[weight_format], write("tree", source, tmp_path), LAYER)
    assert same(decoded(layer), source.meaning())


@pytest.mark.parametrize("threads", [(1,), (1, 1, 1)])
def test_int8_rows_with_two_scales_are_quantised_again(threads, tmp_path):
    """By their new maximum: half a step of it is the most that a weight moves."""
    shape = shape_for("int8", 2, units=3)  # 6 units, so that the middle one of three nodes sees both parts
    source = ReleasedLayer(shape, "int8", 2)
    scales = source.coded["down", 1, 0][1]
    source.coded["down", 1, 1][1][:4] = scales[:4]  # rows that agree are kept as they are
    scales[5] = source.coded["down", 1, 1][1][5] = 0
    layer = make_layer(shape, "int8", threads)
    load_layer(layer, "AMXINT8", write("merged", source, tmp_path), LAYER)
    for (gate, up, down), expected in zip(decoded(layer), source.meaning(), strict=True):
        assert np.array_equal(gate, expected[0])
        assert np.array_equal(up, expected[1])
        row_max = np.abs(expected[2]).max(axis=1, keepdims=True)
        assert (np.abs(down - expected[2]) <= row_max / 254 * 1.0001).all()
        assert not np.array_equal(down, expected[2])
    assert np.array_equal(down[:4], expected[2][:4])
    assert (down[5] == 0).all()


def test_int4_rows_with_two_scales_are_refused(tmp_path):
    shape = shape_for("int4", 2)
    path = write("merged", ReleasedLayer(shape, "int4", 2), tmp_path)
    with pytest.raises(
        ValueError, match=r"layer 3.*threadpool_count=2 and this pool has 1 node.*Use threadpool_count=2"
    ):
        load_layer(make_layer(shape, "int4"), "AMXINT4", path, LAYER)


@pytest.mark.parametrize(("weight_format", "unit"), [("int8", 64), ("int4", 128)])
def test_sizes_that_the_layout_cannot_hold(weight_format, unit, tmp_path):
    for hidden, intermediate in ((unit // 2, unit), (unit, unit // 2)):
        tensors = {}
        for name, rows in (("gate", intermediate), ("up", intermediate), ("down", hidden)):
            name = f"blk.{LAYER}.ffn_{name}_exps.0.numa.0"
            tensors[f"{name}.weight"] = np.zeros(hidden * intermediate * 64 // unit, np.int8)
            tensors[f"{name}.scale"] = np.zeros(rows, np.float32)
        path = write_safetensors(tmp_path / f"{hidden}.safetensors", tensors)
        layer = make_layer(Shape(1, 1, hidden, intermediate), weight_format)
        with pytest.raises(ValueError, match=rf"hidden_size \({hidden}\).*multiples of {unit}; convert"):
            load_layer(layer, METHODS[weight_format], path, LAYER)


@pytest.mark.parametrize("kind", ["merged", "tree"])
@pytest.mark.parametrize(("found", "wanted"), [("int8", "int4"), ("int4", "int8"), ("int8", "bf16"), ("int4", "int4g")])
def test_another_method_is_named(found, wanted, kind, tmp_path):
    shape = shape_for("int4", 1)
    path = write(kind, ReleasedLayer(shape, found, 1), tmp_path)
    message = rf"converted for method {METHODS[found]} \({found}\).*this layer uses method {METHODS[wanted]}"
    with pytest.raises(ValueError, match=message):
        load_layer(make_layer(shape, wanted), METHODS[wanted], path, LAYER)


@pytest.mark.parametrize("kind", ["merged", "tree"])
def test_another_model_is_noticed(kind, tmp_path):
    shape = shape_for("int8", 2)
    path = write(kind, ReleasedLayer(shape, "int8", 2), tmp_path)
    with pytest.raises(ValueError, match="2 parts, which do not divide intermediate_size 191"):
        load_layer(make_layer(Shape(2, 1, 128, 191), "int8"), "AMXINT8", path, LAYER)
    with pytest.raises(ValueError, match=r"[Ii]s it this model"):
        load_layer(make_layer(Shape(2, 1, 192, 128), "int8"), "AMXINT8", path, LAYER)
    with pytest.raises(ValueError, match="has 2 experts; this layer was made for 1"):
        load_layer(make_layer(Shape(1, 1, 128, 128), "int8"), "AMXINT8", path, LAYER)


def test_a_tree_that_is_incomplete(tmp_path):
    shape = shape_for("int8", 2)
    layer = make_layer(shape, "int8", (1, 1))
    path = write("tree", ReleasedLayer(shape, "int8", 2), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"_layer_4 does not exist; .* has _layer_3"):
        load_layer(layer, "AMXINT8", path, 4)
    (scale,) = (path / "_layer_3/_numa_1").glob("INT8_up_1_*_scale_.kt")
    data = scale.read_bytes()
    scale.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"_scale_.kt has 255 bytes; this layer needs 256"):
        load_layer(layer, "AMXINT8", path, LAYER)
    scale.write_bytes(b"")
    with pytest.raises(ValueError, match=r"_scale_\.kt is empty"):
        load_layer(layer, "AMXINT8", path, LAYER)
    scale.unlink()
    with pytest.raises(MissingTensorError, match="_numa_1 has no scale of up of expert 1"):
        load_layer(layer, "AMXINT8", path, LAYER)
    for name in ("INT8_up_1_1Byte_scale_.kt", "INT8_up_1_2Byte_scale_.kt"):
        (scale.parent / name).write_bytes(data)
    with pytest.raises(ValueError, match="are the same weights; remove one"):
        load_layer(layer, "AMXINT8", path, LAYER)
    for file in [*path.glob("_layer_3/_numa_*/*")]:
        file.rename(file.with_name("OTHER_" + file.name))
    with pytest.raises(FileNotFoundError, match=r"no INT8_\*.kt or INT4_\*.kt"):
        load_layer(layer, "AMXINT8", path, LAYER)


def test_merged_files_that_lack_a_tensor(tmp_path):
    shape = shape_for("int8", 1)
    source = ReleasedLayer(shape, "int8", 1)
    del source.coded["down", 1, 0]
    path = write("merged", source, tmp_path)
    with pytest.raises(MissingTensorError, match=r"no tensor 'blk\.3\.ffn_down_exps\.1\.numa\.0\.weight'"):
        load_layer(make_layer(shape, "int8"), "AMXINT8", path, LAYER)
    with pytest.raises(MissingTensorError, match=r"no experts of layer 9 .* experts of the layers 3\.\.3"):
        load_layer(make_layer(shape, "int8"), "AMXINT8", path, 9)


@pytest.mark.parametrize("kind", ["merged", "tree"])
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_what_a_vendors_library_reordered_is_refused(weight_format, kind, tmp_path):
    """Merged files of MOE_INT8 look like those of AMXINT8: what the user calls them must decide."""
    shape, method = shape_for(weight_format, 1), f"MOE_{weight_format.upper()}"
    folder = write(kind, ReleasedLayer(shape, weight_format, 1), tmp_path)
    message = rf"wrote weights for {method} as a library .*kt quant --quant-method {method.lower()}.*AMXINT"
    with pytest.raises(ValueError, match=message):
        load_layer(make_layer(shape, weight_format), method, folder, LAYER)
    if kind == "tree":
        for path in sorted(folder.rglob("*.kt")):
            path.rename(path.with_name(f"MOE_{path.name}"))
        with pytest.raises(ValueError, match=message):
            load_layer(make_layer(shape, weight_format), METHODS[weight_format], folder, LAYER)
