"""The command line: verbs, exit codes, streams, start-up time; the doctor; variables."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import oper
from oper import cli
from oper.errors import InvalidInputError, PlanInfeasibleError, UsageError
from oper.report import doctor
from oper.support.environment import (
    BUILD,
    RENAMED,
    VARIABLES,
    check_environment,
    problems,
    setting,
)
from tests import forked
from tests.support import ROOT, run_oper

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "cvxpy", "matplotlib", "pandas", "highspy", "scipy",
         "pyarrow")


# Code that prints the loaded heavy modules and the processor time, which does not depend on how
# busy the machine is.
TELL = (f"print(json.dumps([[m for m in {HEAVY!r} if m in sys.modules], time.process_time()]), "
        "file=sys.stderr)")


def run_code(code: str) -> tuple[set[str], float]:
    """Return the heavy modules that a Python process loads, and its processor time, s."""
    done = subprocess.run([sys.executable, "-c", f"import json, sys, time\n{code}\n{TELL}"],
                          cwd=ROOT, capture_output=True, text=True, check=True)
    modules, seconds = json.loads(done.stderr.splitlines()[-1])
    return set(modules), seconds


def loaded_by(words: list[str]) -> tuple[set[str], float]:
    """Return the heavy modules that a command loads, and the processor time of the entire process,
    s."""
    return run_code(
        f"from oper.cli import main\ntry:\n    main({words!r})\n"
        "except SystemExit as end:\n    assert end.code == 0")


def test_help_is_fast_and_light() -> None:
    """As is the import of the package, which is a part of it."""
    runs = [loaded_by(["--help"]) for _ in range(5)]
    assert all(modules == set() for modules, _ in runs)
    bare = min(run_code("")[1] for _ in range(5))  # the interpreter alone
    assert min(seconds for _, seconds in runs) - bare < 0.25


@pytest.mark.parametrize("verb", ["preprocess", "analyze", "plan", "explain"])
def test_verbs_on_data_and_plans_are_light(verb: str) -> None:
    modules, _ = loaded_by([verb, "--help"])
    assert modules == set()


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_command_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(cli.COMMANDS[verb][0])
    assert callable(getattr(module, f"run_{verb}"))
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    assert end.value.code == 0
    assert f"usage: oper {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], *([verb] for verb in cli.COMMANDS), ["bench", "train"]],
                         ids=" ".join)
def test_help_breaks_lines_only_at_spaces(words: list[str], monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is broken at a hyphen cannot be found or copied."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("-") or len(line) > 80] == []


def test_help_lists_all_verbs() -> None:
    done = run_oper("--help")
    assert done.returncode == 0
    for verb, (_, help_line) in cli.COMMANDS.items():
        assert re.search(rf"^    {verb}\s+{re.escape(help_line.split()[0])}", done.stdout, re.M)


def test_version() -> None:
    done = run_oper("--version")
    assert (done.returncode, done.stdout) == (0, f"oper {oper.__version__}\n")


@pytest.mark.parametrize("words", [[], ["fly"], ["doctor", "--fly"], ["--fly"]])
def test_usage_errors_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: oper" in err


def numeric_flags() -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield words up to a command, flag and metavar of every flag of every command that takes
    numbers."""
    def of(parser: argparse.ArgumentParser, words: tuple[str, ...]
           ) -> Iterator[tuple[tuple[str, ...], str, str]]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, sub in action.choices.items():
                    yield from of(sub, (*words, name))
            elif action.option_strings and action.type is not None:
                yield words, action.option_strings[-1], getattr(action.type, "__module__", "")

    for verb in cli.COMMANDS:
        yield from (x for x in of(cli.build_parser(verb), ()) if x[0][0] == verb)


def test_every_flag_is_checked_where_it_is_parsed() -> None:
    """With a plain int or float, the command would refuse invalid values later, with another exit
    code."""
    flags = list(numeric_flags())
    assert len(flags) > 40
    assert {(words, flag) for words, flag, kind in flags if kind != "oper.support.flags"} == set()


@pytest.mark.parametrize("words", [
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--batch-size", "0"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--batch-size", "1e9"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--dim", "0"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--target-gap", "nan"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--time-budget", "0"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--seed", "-1"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--allow", "teleported"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--latency-bound", "5"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--objective", "inference",
     "--latency-bound", "5", "--request-rate", "9", "--start", "q"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--objective", "inference",
     "--latency-bound", "5", "--request-rate", "9", "--batch-size", "64"],
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--dense-us", "200,1.5"],
    ["explain", "p", "--what-if", "memory=+x"], ["explain", "p", "--overlap", "forward"],
    ["explain", "p", "--what-if", "memory=x" + "9" * 400],
    ["explain", "p", "--what-if", "link=x2", "--diff", "q"],
    ["explain", "p", "--world-size", "0"], ["explain", "p", "--world-size", "2000"],
    ["simulate", "p", "--steps", "0"],
    ["simulate", "p", "--in-flight", "0"], ["simulate", "p"],
    ["report", "drift", "a", "b", "--html", "c", "--copy-gbps", "0"], ["report", "plan", "p"],
    ["serve", "m", "--port", "99999"], ["serve", "m", "--port", "-1"],
    ["serve", "m", "--workers", "0"], ["serve", "m", "--max-wait-ms", "inf"],
    ["serve", "m", "--drain-s", "-1"], ["serve", "m", "--name", "a/b"],
    ["generate", "w", "-o", "s", "--samples", "0"], ["preprocess", "d", "--workers", "0"],
    ["analyze", "d", "-o", "s", "--cut", "0"], ["calibrate", "-o", "t", "--world-size", "0"],
    ["demo", "--rows", "10"], ["bench", "plan", "--seed", "-1"],
    ["bench", "plan", "--only", "none"],
    ["analyze", "d", "-o", "s", "--memory", "much"], ["analyze", "d", "-o", "s", "--samples", "9"],
    ["analyze", "d", "-o", "s", "--capacity", "9", "--half-life", "5", "--update-samples", "8"],
    *(["preprocess", "csv", "d", "-o", "o", "--sparse", "a", *more] for more in (
        ["--valid", "2"], ["--valid", "1/2", "--test", "0.5"], ["--separator", "ab"],
        ["--cross", "a*b"], ["--sparse", "a:bins=x"], ["--filter", "a"], ["--threshold", "1"],
        ["--vocabulary", "v", "--min-count", "2"], ["--hash", "9", "--max-rows", "9"])),
    *(["preprocess", "criteo-kaggle", "d", "-o", "o", *more] for more in (
        ["--label", "y"], ["--layout", "none"], ["--test", "0.9"])),
    ["plan", "s", "-o", "p", "--topology", "h100-8", "--synchronize-every", "2",
     "--synchronize-delay", "3"],
    ["serve", "m", "--trace", "t", "--trace-s", "700"],
    ["train"], ["train", "--seed", "1", "--set", "seed.x=1"],
    ["train", "--data", "d", "--set", "dynamic.rows=9", "--set", "dynamic.eviction=old"],
    ["train", "--data", "d", "--set", "model.name=hstu", "--set", "model.dim=0"],
    ["train", "--data", "d", "--set", "model.name=hstu", "--set", "interactions.k_core=-1"],
    ["train", "--data", "d", "--batch-size", "0"], ["train", "--data", "d", "--batch-size", "many"],
    ["train", "--data", "d", "--sharding", "magic"], ["train", "--data", "d", "--set", "x=3"],
    ["train", "--data", "d", "--set", "model.dim=0"],
    ["train", "--data", "d", "--set", "model.dim"],
])
def test_bad_values_of_flags_are_usage_errors(words: list[str], tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """The error is raised before anything is read, written or begun."""
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "expected" in err.splitlines()[-1] or "required" in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_the_same_value_in_a_file_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                               ) -> None:
    (tmp_path / "run.toml").write_text('data = "d"\nbatch_size = 0\n')
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 1
    assert "batch_size=0" in capsys.readouterr().err


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], int]], None]]:
    """Make ``oper try`` run a function."""
    def install(body: Callable[[], int]) -> None:
        module = types.ModuleType("try_verb")
        vars(module).update(configure_try=lambda parser: None,
                            run_try=lambda args: (print("begun"), body())[1])
        monkeypatch.setitem(sys.modules, "try_verb", module)
        monkeypatch.setitem(cli.COMMANDS, "try", ("try_verb", "a verb of this test"))

    yield install


def raising(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(("error", "code", "words"), [
    (InvalidInputError("ids are wrong"), 1, "oper: ids are wrong\n"),
    (UsageError("a flag is wrong"), 2, "oper: a flag is wrong\n"),
    (PlanInfeasibleError("needs 3 GB"), 3, "oper: needs 3 GB\n"),
    (FileNotFoundError(2, "No such file", "x.npz"), 1,
     "oper: cannot use 'x.npz': No such file; check the path\n"),
    (PermissionError(13, "Denied", b"x.npz"), 1,
     "oper: cannot use 'x.npz': Denied; check its permissions\n"),
    (OSError(28, "No space left on device", "x.npz"), 1,
     "oper: cannot use 'x.npz': No space left on device\n"),
    (OSError("no number"), 1, "oper: no number\n"),
    (KeyboardInterrupt(), 130, "oper: interrupted\n"),
])
def test_errors_become_a_line_and_a_code(
        verb: Callable[[Callable[[], int]], None], error: BaseException, code: int, words: str,
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPER_DEBUG", raising=False)
    verb(raising(error))
    assert cli.main(["try"]) == code
    assert capsys.readouterr() == ("begun\n", words)


def test_a_warning_of_ours_is_one_line_without_code() -> None:
    code = ("import warnings\nfrom oper import cli\n"
            "try:\n    cli.main(['--version'])\nexcept SystemExit:\n    pass\n"
            "warnings.warn_explicit('look out', UserWarning, cli.__file__, 1)\n"
            "warnings.warn_explicit('not ours', UserWarning, 'elsewhere.py', 1)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    ours, others = done.stderr.splitlines()
    assert ours == "oper: look out"
    assert others == "elsewhere.py:1: UserWarning: not ours"


def test_oper_debug_raises_the_error(verb: Callable[[Callable[[], int]], None],
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPER_DEBUG", "1")
    verb(raising(InvalidInputError("ids are wrong")))
    with pytest.raises(InvalidInputError, match="ids are wrong"):
        cli.main(["try"])


def test_a_bug_keeps_its_traceback(verb: Callable[[Callable[[], int]], None]) -> None:
    verb(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_command_chooses_its_exit_code(verb: Callable[[Callable[[], int]], None], code: int
                                         ) -> None:
    verb(lambda: code)
    assert cli.main(["try"]) == code


def test_a_closed_pipe_prints_no_traceback() -> None:
    code = ("import sys, types\nfrom oper import cli\n"
            "m = types.ModuleType('many')\nm.configure_many = lambda p: None\n"
            "m.run_many = lambda a: [print('x' * 100) for _ in range(100_000)] and 0\n"
            "sys.modules['many'] = m\ncli.COMMANDS['many'] = ('many', 'prints')\n"
            "sys.exit(cli.main(['many']))")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=30) == 1


@pytest.mark.parametrize("words", ["doctor", "--version", "explain nothing.json"])
def test_a_closed_stdout_is_one_error(words: str) -> None:
    """The error is reported before the work and not after it, and never as success."""
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} -m oper {words} >&-"], cwd=ROOT,
                          stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ("oper: cannot print results: stdout='closed', expected an open stream; "
                           "leave it open, or send it to a file or to /dev/null\n")


def test_a_closed_stderr_leaves_stdout_to_results() -> None:
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} -m oper explain nothing.json 2>&-"],
                          cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C"}, {
    "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_names_that_are_not_utf8_are_printed_as_bytes(locale: dict[str, str]) -> None:
    """Python's surrogates would not tell the user the name of the file."""
    done = subprocess.run([sys.executable, "-m", "oper", "explain", b"/no/\xff.json"], cwd=ROOT,
                          capture_output=True, check=False, env={**os.environ, **locale})
    assert done.returncode == 1
    assert rb"'/no/\xff.json'" in done.stderr and b"udc" not in done.stderr, done.stderr


def test_results_can_be_printed_in_any_locale() -> None:
    """Bytes of names are printed unchanged, characters that the encoding lacks escaped."""
    code = ("import sys, types\nfrom oper import cli\n"
            "m = types.ModuleType('say')\nm.configure_say = lambda p: p.add_argument('name')\n"
            "m.run_say = lambda a: print('1 \\u00b5s', a.name) or 0\n"
            "sys.modules['say'] = m\ncli.COMMANDS['say'] = ('say', 'prints')\n"
            "sys.exit(cli.main(sys.argv[1:]))")
    for locale, micro in (({}, "\u00b5".encode()), (
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, rb"\xb5")):
        done = subprocess.run([sys.executable, "-c", code, "say", b"\xff.json"], cwd=ROOT,
                              capture_output=True, check=False, env={**os.environ, **locale})
        assert (done.returncode, done.stdout) == (0, b"1 " + micro + b"s \xff.json\n"), done.stderr


# ---- doctor --------------------------------------------------------------------------------------


def test_doctor_finds_the_cpu_path_working() -> None:
    done = forked.run("-m", "oper", "doctor", "--json", env={"OPER_DATA": "/some/where"})
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, [])
    assert report["libraries"]["host"] == "loads"
    assert report["libraries"]["host kernels"] in ("generic", "avx2", "avx512")
    assert report["versions"]["oper"] == oper.__version__
    assert {"torch", "torchrec", "fbgemm_gpu", "numpy", "pyarrow", "highspy", "python"} <= set(
        report["versions"])
    assert report["machine"]["heap pages"].split(" ")[0] in ("2", "4")
    assert report["environment"]["OPER_DATA"] == "/some/where"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Avoid the import of slow optional packages."""
    monkeypatch.setattr(doctor, "_OPTIONAL", {})


def run_doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = doctor.run_doctor(argparse.Namespace(json=False))
    return code, capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_doctor_text_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_doctor(capsys)
    assert code == 0
    for words in ("versions", "libraries", "machine", "GPUs", "nothing that the CPU path needs",
                  *doctor.ENVIRONMENT):
        assert words in text


@pytest.mark.usefixtures("quick")
def test_doctor_names_a_library_that_does_not_load(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_load_failure", lambda name, path: "undefined symbol")
    code, text = run_doctor(capsys)
    assert code == 1
    assert "the host library: undefined symbol; run make setup" in text
    assert "nothing that the CPU path needs" not in text


@pytest.mark.usefixtures("quick")
def test_doctor_names_a_missing_package(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_REQUIRED", {"no_such_package": "pip install it"})
    monkeypatch.setattr(doctor, "_OPTIONAL", {
        "no_such_extra": (("no-such-extra",), "dreams", "pip install dreams")})
    report = doctor.Report()
    doctor._examine_packages(report)
    assert len(report.problems) == 1
    assert "no_such_package: ModuleNotFoundError" in report.problems[0]
    assert report.problems[0].endswith("pip install it")
    assert report.hints == [
        "no_such_extra is not installed (needed for dreams); pip install dreams"]


def test_doctor_names_what_torchrec_needs_without_its_dependencies() -> None:
    text = (ROOT / "requirements" / "common.txt").read_text()
    _, _, block = text.partition("what torchrec imports")
    needed = re.findall(r"^([\w-]+)==", block.split("\n\n")[0], re.M)
    assert needed and set(needed) <= set(doctor._OPTIONAL["torchrec"][2].split())


def test_doctor_lists_every_variable() -> None:
    names: set[str] = set()
    for path in [*ROOT.glob("oper/**/*.py"), ROOT / "setup.py", ROOT / "tests" / "support.py"]:
        names |= set(re.findall(r"[\"'](OPER_[A-Z_]+)[\"']", Path(path).read_text()))
    for path in ROOT.glob("csrc/**/*"):
        if path.is_file():
            names |= set(re.findall(r"getenv\(\"(\w+)\"", path.read_text()))
    assert names - set(RENAMED) == {n for n in doctor.ENVIRONMENT if n.startswith("OPER_")}


# ---- environment variables -----------------------------------------------------------------------

WRONG = {
    "OPER_DEBUG": ["yes", "2"],
    "OPER_SEND_BUFFER_BYTES": ["big", "-1", "0", "nan", "inf", "0.5"],
    "OPER_DEVICE_HEAP": ["virtually", "Symmetric"],
    "OPER_FBGEMM": ["/no/such/folder", str(ROOT)],
    "OPER_DEVICE_THREADS": ["0", "many", "-5", "1e4", "9" * 30],
    "OPER_DEVICE_OVERLAP": ["no", "2"],
    "OPER_DEADLINE_S": ["abc", "0", "-3", "inf", "nan"],
    "OPER_CPU_KERNELS": ["sse", "AVX2", "avx512 "],
    "OPER_CUDA": ["yes", "2"],
    "OPER_CUDA_ARCHS": ["eighty", "80,sm_90", "8", "75", "75;90"],
    "MAX_JOBS": ["0", "all", "-1"],
}
RIGHT = {
    "OPER_DATA": ["/some/where"], "OPER_DEBUG": ["0", "1"], "OPER_SEND_BUFFER_BYTES": ["1e9",
    "4096"], "OPER_DEVICE_HEAP": ["symmetric", "virtual"], "OPER_DEVICE_THREADS": ["1", "270336"],
    "OPER_DEVICE_OVERLAP": ["0", "1"], "OPER_DEADLINE_S": ["0.5", "300"], "OPER_DOMAIN": ["a b"],
    "OPER_CPU_KERNELS": ["generic", "avx2", "avx512"],
    "OPER_CUDA": ["auto", "0", "1"], "OPER_CUDA_ARCHS": ["80;90", "80, 90a", "100f"],
    "CUDA_HOME": ["/usr/local/cuda"], "CXX": ["clang++ -v"], "MAX_JOBS": ["2"],
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_every_variable_has_its_cases(tmp_path: Path) -> None:
    assert set(WRONG) == {n for n, v in VARIABLES.items() if v.expected}
    (tmp_path / "fbgemm_gpu").mkdir()
    assert set(RIGHT) | {"OPER_FBGEMM"} == set(VARIABLES)
    assert VARIABLES["OPER_FBGEMM"].accepts(str(tmp_path))


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in WRONG.items() for t in texts])
def test_invalid_variables_are_refused_by_name(name: str, text: str, monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidInputError, match=f"cannot go: environment variable {name}="):
        setting(name, "cannot go")
    with pytest.raises(InvalidInputError, match=name):
        check_environment(at=VARIABLES[name].at)
    (line,) = problems()
    assert line.startswith(f"{name}=") and VARIABLES[name].expected in line


@pytest.mark.parametrize(("name", "text"), [
    *((n, t) for n, texts in RIGHT.items() for t in texts), *((n, "") for n in VARIABLES)])
def test_valid_values_of_variables_are_accepted(name: str, text: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert setting(name) == text
    check_environment()
    check_environment(at=BUILD)
    assert list(problems()) == []


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_variables_with_an_old_name_are_refused(old: str, new: str, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    monkeypatch.setenv(old, "1000")
    with pytest.raises(InvalidInputError, match=rf"{old}.*set {new}"):
        check_environment(at=VARIABLES[new].at)
    (line,) = problems()
    assert old in line and new in line


def test_nothing_starts_with_an_invalid_variable() -> None:
    """Neither a command, even if it does not use the variable, nor `oper.shard` on one rank."""
    name, text = "OPER_DEADLINE_S", "abc"
    done = forked.run("-m", "oper", "explain", "nothing.json", env={name: text})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"environment variable {name}='{text}'" in done.stderr
    program = ("import torch, oper; from oper.errors import InvalidInputError\n"
               "bag = torch.nn.EmbeddingBag(9, 4, mode='sum')\n"
               "for act in (lambda: oper.shard(bag, optimizer=oper.SGD()),\n"
               "            lambda: oper.publish(bag, 'environment'),\n"
               "            lambda: oper.attach(bag, 'environment', timeout_s=0)):\n"
               "    try:\n        act()\n"
               f"    except InvalidInputError as error:\n        assert {name!r} in str(error)\n"
               "    else:\n        raise SystemExit('it has begun')\n")
    started = forked.run("-c", program, env={name: text})
    assert started.returncode == 0, started.stderr


def test_doctor_reports_invalid_variables() -> None:
    done = forked.run("-m", "oper", "doctor", env={
        "OPER_CPU_KERNELS": "sse", "OPER_DEADLINE_S": "abc", "MAX_JOBS": "all"})
    assert done.returncode == 1
    missing = done.stdout[done.stdout.index("\nmissing\n"):]
    for line in ("OPER_CPU_KERNELS='sse', expected one of generic, avx2, avx512",
                 "OPER_DEADLINE_S='abc', expected a number of seconds above 0",
                 "MAX_JOBS='all', expected a whole number above 0"):
        assert line in missing
    assert "nothing that the CPU path needs" not in missing
    assert "make setup" not in missing, "the libraries are not to blame"


def test_kernels_that_are_not_in_use_are_reported() -> None:
    """If the processor lacks them, or if the variable was set too late."""
    program = ("import os, torch\nfrom oper.shmem import library\nlibrary.register()\n"
               "used = torch.ops.oper.kernel_name()\n"
               "os.environ['OPER_CPU_KERNELS'] = used\nlibrary.load()\n"
               "os.environ['OPER_CPU_KERNELS'] = 'generic' if used != 'generic' else 'avx2'\n"
               "try:\n    library.load()\nexcept ValueError as error:\n"
               "    assert f'{used} are in use' in str(error), error\n"
               "else:\n    raise SystemExit('other kernels run, without a word')\n")
    done = forked.run("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["MAX_JOBS", "OPER_CUDA", "OPER_CUDA_ARCHS"])
def test_the_build_refuses_invalid_variables(name: str) -> None:
    done = subprocess.run([sys.executable, "setup.py", "-q", "--version"], cwd=ROOT, text=True,
                          capture_output=True, check=False,
                          env={**os.environ, name: WRONG[name][0]})
    assert done.returncode == 1
    assert done.stderr.startswith(f"cannot build: environment variable {name}="), done.stderr
