"""Where a checkpoint is looked for, and what is said when it is not there."""

from pathlib import Path

import huggingface_hub
import pytest

from convert import resolve


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("org/name") == Path("org/name")
    assert resolve("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "source", ["", " ", "nowhere", "/no/such/directory", "../no/where", "a/b/c", "https://x.org/a", "a/b?"]
)
def test_a_missing_directory_is_named(source: str) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory: '.*expected a checkpoint's directory, or"):
        resolve(source)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file: give the directory"):
        resolve(tmp_path / "model.safetensors")


def test_an_id_is_downloaded_without_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {}

    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked[repo_id] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("GSAI-ML/LLaDA-8B-Base") == tmp_path
    assert asked == {"GSAI-ML/LLaDA-8B-Base": ["*.safetensors", "*.json", "*.jinja", "*.txt"]}


def test_without_a_network_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("Name or service not known\nPlease check your connection.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ValueError, match="no such directory: some/model, and the Hugging Face hub could not be .*not known"
    ):
        resolve("some/model")
