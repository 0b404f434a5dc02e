"""A GPU session without a GPU: the script's order, budgets and faults over a stand-in interpreter, its check, and one real dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import fast_figures, gpu_check, gpu_figures, kept_rows, report, slice_cases
from services.common.errors import ConfigError

SCRIPT = report.ROOT / "bench" / "gpu_session.sh"
STEPS = {
    "bench.gpu_check": "check",
    "gpu_exact_slice prepare": "prepare",
    "gpu_exact_slice ours --first": "ours",
    "gpu_exact_slice ours ": "ours_rest",
    "gpu_exact_slice stock ": "stock",
    "gpu_exact_slice stock_resident": "stock_resident",
    "--only speed --first": "fast",
    "--only speed ": "fast_rest",
    "--only hidden": "hidden",
    "--only hints": "hints",
    "--only fidelity": "fidelity",
    "bench.gpu_exact ": "exact",
    "bench.gpu_int_kernel": "int_kernel",
    "test_early_router": "tests_hints",
    "test_waits": "tests_fast",
    "test_int_expert": "tests_kernel",
    "bench.gpu_kept": "kept",
    "gpu_exact_slice start": "start",
    "gpu_exact_slice clean": "clean",
    "bench.gpu_figures": "figures",
}
SERVING = ("waits", "fast", "arena_check", "round_trip", "gather", "joined", "broken_passes")
# Notes its arguments; what the file of that name beside it says is printed, and its exit code is what the file `NAME.code` holds.
STAND_IN = """#!/bin/sh
echo "$*" >> {folder}/calls
for part in {folder}/on/*; do
  [ -e "$part/match" ] || continue
  case "$*" in *"$(cat "$part/match")"*) cat "$part/text"; exit "$(cat "$part/code")" ;; esac
done
"""


class Session:
    """Runs parts over the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.out = folder, folder / "state", folder / "out"
        self._python = folder / "python"
        self._python.write_text(STAND_IN.format(folder=folder))
        self._python.chmod(0o755)
        (folder / "on").mkdir()

    def on(self, match: str, text: str = "", code: int = 0) -> None:
        """What a command that holds `match` prints and ends with."""
        part = self.folder / "on" / str(len(list((self.folder / "on").iterdir())))
        part.mkdir()
        for name, value in (("match", match), ("text", text), ("code", str(code))):
            (part / name).write_text(value)

    def forget(self) -> None:
        """Every command prints nothing and succeeds."""
        for part in (self.folder / "on").iterdir():
            (part / "match").unlink()

    def run(self, *words: str, **env: str) -> tuple[int, list[str], str]:
        """(exit code, steps that ran, output)."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        whole = {**os.environ, "PYTHON": str(self._python), "GPU_SESSION_STATE": str(self.state), **env}
        done = subprocess.run(["bash", str(SCRIPT), *words], env=whole, capture_output=True, text=True, timeout=60, check=False)
        lines = calls.read_text().splitlines() if calls.exists() else []
        return done.returncode, [step_of(line) for line in lines], done.stdout + done.stderr

    def part(self, number: int, **env: str) -> tuple[int, list[str], str]:
        return self.run(str(number), str(self.out), **env)


def step_of(line: str) -> str:
    return next(name for text, name in STEPS.items() if text in line + " ")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


OWN = {
    1: ["check", "prepare", "ours", "fast"],
    2: ["check", "prepare", "stock", "stock_resident", "exact", "fidelity", "hidden", "tests_fast", "tests_kernel", "kept"],
}


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_begins_with_its_own_list_and_goes_on_with_what_is_missing(session: Session, part: int) -> None:
    """Alone, whichever it is; the table comes last; run again, it has nothing to do but the table."""
    code, steps, said = session.part(part)
    assert code == 0
    assert steps[: len(OWN[part])] == OWN[part]
    assert steps[-1] == "figures"
    assert sorted(steps) == sorted(set(STEPS.values()) - {"clean"})
    assert "not finished" not in said
    assert session.part(part)[1] == ["figures"]


def test_the_parts_share_the_work(session: Session) -> None:
    """What one part finished no other does again; what it did in part goes on, each part's own list first."""
    for text in ("gpu_exact_slice ours --first", "--only fidelity"):
        session.on(text, "no time for: more of it\n")
    first = session.part(1, GPU_SESSION_SECONDS="119")[1]
    assert first[:7] == ["check", "prepare", "ours", "fast", "start", "ours", "ours"]
    assert first[7:11] == ["stock_resident", "exact", "fidelity", "hidden"]
    assert "stock" not in first  # its load alone takes longer
    session.forget()
    assert session.part(2)[1] == ["stock", "fidelity", "ours", "figures"]
    assert session.part(1)[1] == ["figures"]


def test_the_rest_comes_behind_what_every_session_must_have(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either part alone; stock's rows are short ones, and bits of an earlier boot are quoted when they are given."""
    monkeypatch.chdir(session.folder)
    (session.folder / "earlier.json").write_text("{}")
    for part in (1, 2):
        steps = session.part(part, GPU_SESSION_FIDELITY="earlier.json")[1]
        assert steps[-3:] == ["ours_rest", "fast_rest", "figures"]
        lines = (session.folder / "calls").read_text().splitlines()
        stock = next(line for line in lines if step_of(line) == "stock")
        assert stock.split("--warm ")[-1].startswith("60 ")
        assert stock.split("--steps ")[-1].startswith("60")
        assert all(f"--fidelity-from {session.folder}/earlier.json" in line for line in lines if "bench.gpu_fast " in line)
        (session.state / "boot").write_text("another\n")


def test_what_does_not_fit_is_named(session: Session) -> None:
    """Half a minute is too little for a bench: it does not begin, and the table is there all the same."""
    code, steps, said = session.part(2, GPU_SESSION_SECONDS="47")
    assert (code, steps) == (0, ["check", "prepare", "figures"])
    assert "stock: left out, it needs 150 s and 2" in said
    assert "left out in this part: stock stock_resident exact" in said
    assert "not finished: stock\n" in said


def test_a_bench_gets_less_time_than_its_step(session: Session) -> None:
    """So that it ends by itself, with its last row written."""
    session.part(1)
    for name, most in (("ours", 300 - 15), ("fast", 330 - 15), ("stock", 300 - 15), ("fidelity", 200 - 15)):
        line = next(line for line in (session.folder / "calls").read_text().splitlines() if step_of(line) == name)
        assert 60 <= int(line.split("--seconds ")[1].split()[0]) <= most


def test_the_tests_are_those_of_what_serves(session: Session) -> None:
    """One step runs them; it takes 70 s, so it does not begin with less."""
    session.part(2)
    lines = (session.folder / "calls").read_text().splitlines()
    line = next(line for line in lines if step_of(line) == "tests_fast")
    files = [word for word in line.split() if word.startswith("tests/")]
    assert files == [f"tests/gpu/test_{name}.py" for name in SERVING]
    assert all((report.ROOT / file).exists() for file in files)
    (session.state / "done.tests_fast").unlink()
    assert session.part(2, GPU_SESSION_SECONDS="92")[1] == ["figures"]
    assert session.part(2, GPU_SESSION_SECONDS="120")[1] == ["tests_fast", "figures"]


def test_a_step_that_fails_is_told_and_left_for_the_next_part(session: Session) -> None:
    """The others go on; its last words are shown; in the same part it begins a few times at most."""
    session.on("gpu_exact_slice ours --first", "CUDA error: an illegal memory access\n", 3)
    session.on("gpu_exact_slice stock ", '{"name": "stock/C1", "error": "slow"}\n')
    code, steps, said = session.part(1)
    assert code == 1
    assert "ours: failed with 3" in said
    assert "an illegal memory access" in said
    assert "stock: some rows failed" in said
    assert (steps.count("ours"), steps.count("stock"), steps[-1]) == (3, 1, "figures")  # ours begins behind the row that broke it
    assert "not finished: ours\n" in said
    session.forget()
    code, steps, _ = session.part(2)
    assert (code, sorted(steps)) == (0, ["figures", "ours", "stock"])


def test_a_row_that_time_cut_off_is_no_failure(session: Session) -> None:
    """It is measured by a later command."""
    session.on("gpu_exact_slice ours", '{"name": "ours/resident/C1", "error": "the time was over before the first measured step"}\n')
    code, _, said = session.part(2)
    assert code == 0
    assert "ours: some of it" in said
    assert "not finished: ours\n" in said


def test_a_machine_that_lacks_something_costs_no_time(session: Session) -> None:
    """The check's words are shown, nothing else runs, and the next command checks again."""
    session.on("bench.gpu_check", "GPU: torch finds no NVIDIA GPU: take another machine\n", 2)
    code, steps, said = session.part(1)
    assert (code, steps) == (2, ["check"])
    assert "torch finds no NVIDIA GPU" in said
    session.forget()
    assert session.part(1)[1][0] == "check"


def test_another_boot_begins_anew(session: Session) -> None:
    """Rows and steps of another boot belong to another run."""
    session.part(1)
    (session.state / "boot").write_text("another\n")
    (session.state / "gpu_fast.rows").write_text("{}")
    assert session.part(1)[1][0] == "check"
    assert not (session.state / "gpu_fast.rows").exists()


def test_folders_are_those_of_the_caller(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative ones too; `clean` takes the state away and leaves the results."""
    monkeypatch.chdir(session.folder)
    assert session.run("1", "results", GPU_SESSION_STATE="kept", PYTHON="./python")[0] == 0
    assert (session.folder / "results" / "session.log").exists()
    assert (session.folder / "kept" / "done.ours").exists()
    assert session.run("clean", "results", GPU_SESSION_STATE="kept", PYTHON="./python")[1] == ["clean"]
    assert not (session.folder / "kept").exists()
    assert (session.folder / "results" / "session.log").exists()


def test_few_files_come_back(session: Session) -> None:
    """Results and one log, no rows and no logits: a rented machine may give eight files back."""
    session.state.mkdir()
    (session.state / "boot").write_text(kept_rows.boot_id() + "\n")
    for name in (
        "gpu_exact.json",
        "gpu_exact_slice.json",
        "gpu_fast.json",
        "gpu_int_kernel.json",
        "figures.json",
        "figures.txt",
        "gpu_kept.json",
        "triton_pins.json",
    ):
        (session.state / name).write_text("{}")
    for name in ("gpu_fast.rows", "gpu_fast.rows.exact.npz"):
        (session.state / name).write_text("")
    session.part(1)
    assert {path.name for path in session.out.iterdir()} == {
        "gpu_exact.json", "gpu_exact_slice.json", "gpu_fast.json", "gpu_int_kernel.json", "gpu_kept.json", "figures.json",
        "triton_pins.json", "session.log",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ([], {}, "exact on the slice, fast on the slice, a worker's"),
        (["3", "out"], {}, "exact on the slice, fast on the slice, a worker's"),
        (["1", "out", "--dry"], {}, "exact on the slice, fast on the slice, a worker's"),
        (["1", "out"], {"GPU_SESSION_SECONDS": "9m"}, "whole numbers, not '9m'"),
        (["1", "out"], {"GPU_SESSION_FIDELITY": "/none.json"}, "there is no file /none.json"),
        (["1", "out"], {"GPU_SESSION_LAYERS": "-1"}, "whole numbers, not '-1'"),
    ],
)
def test_wrong_words_are_refused(session: Session, words: list[str], env: dict[str, str], message: str) -> None:
    """With what there is, before anything runs."""
    code, steps, said = session.run(*[str(session.folder / word) if word == "out" else word for word in words], **env)
    assert (code, steps) == (2, [])
    assert message in said


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_dry_run_of_one_part_fills_every_figure(tmp_path: Path) -> None:
    """The real commands, part 2 with no part before it: every figure has a value, or a reason."""
    env = {
        **os.environ,
        "PYTHON": sys.executable,
        "GPU_SESSION_STATE": str(tmp_path / "state"),
        "GPU_SESSION_STEPS": "6",
        "GPU_SESSION_LAYERS": "2",
    }
    command = ["bash", str(SCRIPT), "2", str(tmp_path / "out"), "--dry-run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "not finished" not in done.stdout
    summaries: dict[str, Any] = json.loads((tmp_path / "out" / "figures.json").read_text())
    null = {
        gpu_figures.EXACT: {"c1_vs_stock165", "c1_tok_s"},  # of two layers no speed is quoted
        gpu_figures.FAST: set(),
    }
    for name, keys in ((gpu_figures.EXACT, gpu_figures.EXACT_KEYS), (gpu_figures.FAST, gpu_figures.FAST_KEYS)):
        missing = {key for key in keys if summaries[name][key] is None}
        assert missing == null[name]
        assert missing <= set(summaries[name]["reason_for_null"])
    table = done.stdout
    assert all(f"\n{key} " in table for key in (*gpu_figures.EXACT_KEYS, *gpu_figures.FAST_KEYS))
    assert "\nTransformerBlock " in table
    assert "a dry run: no figure here means anything" in table
    assert all(summaries[name]["dry_run"] for name in (gpu_figures.EXACT, gpu_figures.FAST, gpu_figures.SLICE))
    document = json.loads((tmp_path / "out" / gpu_figures.SLICE).read_text())
    assert document["command"].startswith("python -m bench.gpu_exact_slice ")  # of the bench, not of the table
    assert document["facts"]["boot_id"] == kept_rows.boot_id()


def test_a_table_without_any_row_gives_reasons(tmp_path: Path) -> None:
    """Nothing ran: no figure is left without a word, and no result file is made up."""
    summaries = gpu_figures.write_all(tmp_path)
    lines = gpu_figures.lines(summaries)
    for key in (*slice_cases.NEEDS, *fast_figures.NEEDS, "bit_exact"):
        assert any(line.startswith(f"{key} ") and "null: " in line for line in lines), key
    assert list(tmp_path.iterdir()) == []


def test_the_check_names_what_is_missing_and_the_fix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Packages, kernels, GPU, exllamav3, machine code, room; the exit code says that the benches cannot run."""
    gib = gpu_check.GIB
    assert gpu_check.memory(12, 125 * gib, 128 * gib, 0) is None
    assert gpu_check.memory(12, 125 * gib, 60 * gib, 66 * gib) is None  # the slice is there already
    assert gpu_check.memory(12, 0, 128 * gib, 0) is None  # a kernel that does not tell
    assert "12 MoE layers need 109 GiB of RAM beside stock's split, there are 90" in str(gpu_check.memory(12, 90 * gib, 128 * gib, 0))
    assert "12 MoE layers need 77 GiB of /dev/shm, 64 are free" in str(gpu_check.memory(12, 125 * gib, 64 * gib, 0))
    monkeypatch.setattr(gpu_check, "MODULES", ("json", "no_such_package"))
    assert gpu_check.main([]) == 2
    assert "lacks no_such_package: install them" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "MODULES", ("json",))
    monkeypatch.setattr(gpu_check, "gpu", lambda: "torch finds no NVIDIA GPU: take another machine")
    asked: list[Any] = []
    monkeypatch.setattr(gpu_check, "memory", lambda layers, total, experts_in_files: asked.append((layers, total, experts_in_files)))
    assert gpu_check.main([]) == 2
    assert "GPU: torch finds no NVIDIA GPU" in capsys.readouterr().out
    assert gpu_check.main(["--dry-run"]) == 0
    gpu_check.main(["--layers", "42", "--arena-only", "--ram-gib", "256"])
    assert asked == [(12, None, True), (42, 256 * gib, False)]


def test_the_check_looks_at_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, another exllamav3, kernels that are not built, or built for another GPU."""
    import torch

    from kernels.python import cuda_expert
    from services.gpu_worker.backends import select
    from services.gpu_worker.patches import upstream

    def refuse() -> None:
        raise ConfigError("exllamav3 1.6.0 is installed, 1.5.1 is known", param="GLM53_DEVICE")

    monkeypatch.setattr(select, "gpu_problem", lambda: "exllamav3 is not installed")
    assert "exllamav3 is not installed: install exllamav3==1.5.1" in str(gpu_check.gpu())
    monkeypatch.setattr(select, "gpu_problem", lambda: "")
    monkeypatch.setattr(upstream, "check", refuse)
    assert gpu_check.gpu() == "GLM53_DEVICE: exllamav3 1.6.0 is installed, 1.5.1 is known"
    monkeypatch.setattr(upstream, "check", lambda: None)
    monkeypatch.setattr(cuda_expert, "is_built", lambda: False)
    assert "bring kernels/python/lib along" in str(gpu_check.gpu())
    monkeypatch.setattr(cuda_expert, "is_built", lambda: True)
    monkeypatch.setattr(cuda_expert, "architectures", lambda: ["80", "86"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "built for 80, 86, this GPU has 90" in str(gpu_check.gpu())
    monkeypatch.setattr(cuda_expert, "architectures", lambda: ["90"])
    monkeypatch.setitem(sys.modules, "exllamav3", type(sys)("exllamav3"))
    assert gpu_check.gpu() is None
