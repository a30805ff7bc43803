"""Nothing is written through a link, and what a link leads to is not deleted."""

from pathlib import Path

import pytest

from fedsim.core.errors import FedsimError
from fedsim.jobs.cli import run
from fedsim.report.__main__ import main
from fedsim.results.files import ERROR, METRICS, OutputError, RunFolder, owned
from tests.checkpoint_toys import WORDS, folder_in

pytestmark = pytest.mark.usefixtures("empty_folder")
CONTENT = b"of somebody else\n"


def planted(*links: Path) -> Path:
    """A file to which all of `links` lead."""
    victim = Path("victim").absolute()
    victim.write_bytes(CONTENT)
    for link in links:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
    return victim


def test_links_in_place_of_temporary_files() -> None:
    folder = Path("outputs/a")
    names = ["config.yaml.tmp", f"{ERROR}.tmp", f"{METRICS}.tmp", "summary.json.tmp"]
    victim = planted(*(folder / name for name in names), Path("outputs/.locks/a.holder.txt.tmp"))
    RunFolder(folder).write_error({}, "text")
    with owned(folder):
        assert Path("outputs/.locks/a.holder.txt").is_file()
    RunFolder(folder).write_summary({"status": "done"})
    assert victim.read_bytes() == CONTENT
    assert (folder / ERROR).read_text() == "text"


def test_links_in_a_report() -> None:
    assert run([*WORDS]) == 0
    names = ("report.html", "summary.json", "tables.md", "overview.csv", "overview.tex")
    victim = planted(*(Path("outputs/report") / f"{name}.tmp" for name in names))
    assert main(["outputs", "--no-figures"]) == 0
    assert victim.read_bytes() == CONTENT
    assert not list(Path("outputs/report").glob("*.tmp"))


def test_records_that_are_a_link() -> None:
    assert run([*WORDS, "num_rounds=2"]) == 0
    folder = RunFolder(folder_in("outputs"))
    victim = planted(folder.path / METRICS)
    for write in (lambda: folder.append({}), folder.sync_records, lambda: folder.reopen({METRICS: 3})):
        with pytest.raises(OutputError, match="it is a link: remove it"):
            write()
        assert victim.read_bytes() == CONTENT


def test_a_run_folder_that_is_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS]) == 0
    folder = folder_in("outputs")
    folder.rename("elsewhere")
    (Path("elsewhere") / "summary.json").unlink()
    before = {path.name: path.read_bytes() for path in Path("elsewhere").iterdir()}
    folder.symlink_to(Path("elsewhere").absolute())
    for words in ([], ["overwrite=true"]):
        with pytest.raises(FedsimError, match="is a link; remove it, or choose another output_dir"):
            run([*WORDS, *words])
        assert {path.name: path.read_bytes() for path in Path("elsewhere").iterdir()} == before
