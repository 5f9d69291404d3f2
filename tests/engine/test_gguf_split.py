"""Models split over several files by the gguf package, read as one, and refused where a part is amiss."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from quadjet.engine.errors import ModelFileError
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.reference import ReferenceBackend
from reference_runs import run, some_tokens
from tiny_models import VOCAB, tiny_model

STEM = "model"


def copy_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case np.ndarray():
            writer.add_array(key, value.tolist())
        case list():
            writer.add_array(key, value)


def split(whole: Path, folder: Path, tensors_a_part: int) -> list[Path]:
    with GgufFile.open(whole) as file:
        writer = gguf.GGUFWriter(folder / STEM, "qwen3", split_max_tensors=tensors_a_part)
        for key, value in file.metadata.items():
            if key != "general.architecture":
                copy_value(writer, key, value)
        for name, info in file.tensors.items():
            writer.add_tensor(name, file.raw(name).view(np.float32).reshape(info.shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return sorted(folder.glob(f"{STEM}-*.gguf"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("whole"), arch="qwen3")


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    return split(whole, tmp_path, 15)


def test_the_parts_are_one_model(whole: Path, parts: list[Path]) -> None:
    assert len(parts) == 3
    tokens = some_tokens(20, VOCAB, seed=1)
    with GgufFile.open(whole) as one, GgufFile.open(parts[0]) as three:
        assert three.tensors.keys() == one.tensors.keys()
        for name in one.tensors:
            assert np.array_equal(three.raw(name), one.raw(name))
        assert {info.part for info in three.tensors.values()} == {0, 1, 2}
        expected = run(ReferenceBackend(one, num_pages=1), tokens, 20)
        assert np.array_equal(run(ReferenceBackend(three, num_pages=1), tokens, 20), expected)


def test_the_first_part_must_be_named(parts: list[Path]) -> None:
    with pytest.raises(ModelFileError, match=r"(?s)not the first of 3 parts.*-00001-of-"):
        GgufFile.open(parts[1])


def test_a_part_that_is_not_there_is_named(parts: list[Path]) -> None:
    parts[2].unlink()
    with pytest.raises(ModelFileError, match=r"model-00003-of-00003\.gguf: No such file"):
        GgufFile.open(parts[0])


def test_a_part_in_the_place_of_another_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelFileError, match=r"should be part 3 of 3"):
        GgufFile.open(parts[0])


def test_a_part_under_another_name_is_refused(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(ModelFileError, match=r"does not end in -00001-of-00003\.gguf"):
        GgufFile.open(renamed)


def test_a_whole_model_in_the_place_of_a_part_is_refused(whole: Path, parts: list[Path]) -> None:
    shutil.copy(whole, parts[1])
    with pytest.raises(ModelFileError, match=r"should be part 2 of 3"):
        GgufFile.open(parts[0])


def test_a_part_that_is_cut_short_is_refused(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-40])
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003\.gguf is damaged"):
        GgufFile.open(parts[0])


@pytest.mark.parametrize("count", [2**31, 1025])
def test_a_count_that_cannot_be_is_refused(tmp_path: Path, count: int) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_uint32("split.count", count)
    writer.add_tensor("a", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=rf"split\.count is {count}"):
        GgufFile.open(path)
