"""Common parts of all tests.

An environment without credentials, servers on loopback with real data, the profiles of the property tests (``ci`` by
default, ``pytest --hypothesis-profile thorough`` before a release), and the table of counts at the end of a soak.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.datasets import write_digits, write_photos
from tests.servers import Moto, moto_server, rclone_s3
from tests.zygote import EXEC, use_zygote

# No deadlines: the test machines are shared, so a slow example is not a failure.
settings.register_profile("ci", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("ci"), max_examples=300)
settings.load_profile("ci")

_CLOUDS = (
    "AWS_",
    "GOOGLE_",
    "AZURE_",
    "CLOUDSDK_",
    "GCE_",
    "HF_",
    "STORAGE_EMULATOR",
    "CACHETOOL_",
    "IDENTITY_",
    "MSI_",
)

# Otherwise each of some thousand processes would start threads for linear algebra, which none of them uses.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Containers may set this to forbid .pyc files. Then each process would compile the whole package again: 60 to 100 ms.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A script that runs the tests in the background ignores Ctrl-C, and every program started here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """Start the package's processes in tests as forks: see :mod:`tests.zygote`."""
    use_zygote()


def pytest_xdist_auto_num_workers() -> int:
    """Use two processes per core for ``-n auto``: half of the time a test waits for another process, a server or a
    disk.
    """
    return 2 * len(os.sched_getaffinity(0))


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """A scheduler that distributes single tests, except for modules with a costly common part. One process gets all
    tests that need the cluster, and all tests of a module that read the output of one long program.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if "tests/ray/" in module and not module.endswith("/test_unconnected.py"):
            return "tests/ray"
        shares = module.endswith("/test_tensorflow.py")
        return module if shares else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Together:
    """Return the scheduler of the tests."""
    return Together(config, log)


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Remove the machine's credentials, proxies and cache variables. Loopback is never reached by a proxy."""
    for name in os.environ:
        if name.startswith(_CLOUDS) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    nowhere = tmp_path_factory.getbasetemp() / "nowhere"
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "CLOUDSDK_CONFIG", "NETRC"):
        monkeypatch.setenv(name, str(nowhere))


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the package's processes as users do, instead of forking them."""
    monkeypatch.setenv(EXEC, "1")


@pytest.fixture(scope="session")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the data of ``s3_env``: the folders ``digits/train/`` and ``photos/``."""
    root = tmp_path_factory.mktemp("buckets")
    write_digits(root / "digits" / "train")
    write_photos(root / "photos")
    return root


@pytest.fixture(scope="session")
def digits(buckets: Path) -> Path:
    """Return the folder of the 1,797 digits: ``0000.npy`` and ``0000.json`` each."""
    return buckets / "digits" / "train"


@pytest.fixture(scope="session")
def photos(buckets: Path) -> Path:
    """Return the folder of the photographs."""
    return buckets / "photos"


@pytest.fixture(scope="session")
def s3_env(buckets: Path) -> Iterator[dict[str, str]]:
    """Return the environment for an S3 server with the buckets ``digits`` and ``photos``. The server checks the
    keys.
    """
    with rclone_s3(buckets) as env:
        yield env


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    """Start an S3 server that tests can put objects into. It implements ranges and accepts any key."""
    with moto_server() as server:
        yield server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the counts that tests recorded with ``record_property``, after a soak or with ``--figures``."""
    if "not soak" in config.getoption("markexpr") and not config.getoption("figures"):
        return
    rows = [
        (report.nodeid, report.outcome, f"{report.duration:.0f} s", report.user_properties)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call" and report.user_properties
    ]
    if rows:
        terminalreporter.section("what was done how often")
    for name, outcome, seconds, counts in sorted(rows):
        told = ", ".join(f"{what} {value:,}" if isinstance(value, int) else f"{what} {value}" for what, value in counts)
        terminalreporter.write_line(f"{outcome} {name}, {seconds}\n    {told}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", action="store_true", help="print what the fault tests counted, also without a soak")
