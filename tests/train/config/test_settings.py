from pathlib import Path

import pytest

from xlashard.train.config.schema import reference
from xlashard.train.config.settings import Settings, load_settings, setting_changes
from xlashard.train.errors import SettingsError
from xlashard.train.model.checks import check_settings

ROOT = Path(__file__).resolve().parents[3]
KEYS = reference(Settings)
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def refusal(path: Path, *words: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(path, words)
    return str(caught.value)


def test_small_settings_files_exist() -> None:
    assert {"tiny.toml", "tiny_dp.toml", "tiny_tp.toml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_settings_file_is_valid(path: Path) -> None:
    settings = load_settings(path)
    check_settings(settings)
    assert settings.run.name == path.stem


def test_run_name_of_the_file_is_kept_or_overridden(tmp_path: Path) -> None:
    path = tmp_path / "any.toml"
    path.write_text('[run]\nname = "mine"\n')
    assert load_settings(path).run.name == "mine"
    assert load_settings(path, ["run.name=other"]).run.name == "other"


def test_error_of_invalid_settings_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "any.toml"
    path.write_text("[model]\nlayer = 3\n")
    text = refusal(path)
    assert str(path) in text
    assert "model.layers" in text


def test_error_of_a_missing_file_suggests_similar_names() -> None:
    text = refusal(ROOT / "configs" / "tinny.toml")
    assert "does not exist" in text
    assert "tiny_dp.toml" in text


def test_shipped_files_are_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = load_settings(ROOT / "configs" / "tiny.toml")
    monkeypatch.chdir(tmp_path)
    assert load_settings("tiny.toml") == load_settings("configs/tiny.toml") == shipped
    assert "xlashard has: configs/tiny.toml, " in refusal(Path("tinny.toml"))
    assert "does not exist" in refusal(tmp_path / "tiny.toml")
    (tmp_path / "tiny.toml").write_text('[run]\nname = "mine"\n')
    assert load_settings("tiny.toml").run.name == "mine"


def test_invalid_toml_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "any.toml"
    path.write_text("[model]\nlayers = = 3\n")
    assert "line 2" in refusal(path)
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refusal(path)
    assert "cannot be read" in refusal(tmp_path)


def test_changes_compare_integers_of_any_size() -> None:
    changes = setting_changes(f"seed = {2**64 - 1}\nwidth = 4", "seed = 1\nwidth = 4")
    assert changes == {"seed": (str(2**64 - 1), "1")}


def test_the_guide_has_the_table_of_keys() -> None:
    guide = (ROOT / "docs" / "guides" / "training.md").read_text(encoding="utf-8")
    rows = [f"| `{key}` | {kind} | `{default}` | {note} |" for key, kind, default, note in KEYS]
    assert "\n".join(rows) in guide
