"""One set of objects pulled from every kind of place: all have the same content digests.

The default suite has 200 objects, ``-m soak`` 2,000. Azure is included if ``azurite-blob`` is installed (``npm install
azurite``). rclone simulates Google's storage: it speaks the part of its XML that reads.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cachetool
from tests.servers import azurite, folder_server, hub_server, rclone_s3, sftp_server

BUCKET = "bucket"


def write_objects(folder: Path, samples: int) -> None:
    """Write two objects per sample: an array and a JSON object."""
    generator = np.random.default_rng(0)
    for number in range(samples):
        place = folder / f"part{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{number:05d}.image.npy", generator.normal(size=(16, 16)).astype(np.float32))
        about = {"label": number, "name": f"sample \u00e9 {number}"}
        (place / f"{number:05d}.json").write_text(json.dumps(about))


@contextlib.contextmanager
def served(kind: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of ``root/bucket`` on one kind of server, with its credentials in the environment."""
    with contextlib.ExitStack() as stack:
        env: dict[str, str] = {}
        if kind == "local":
            url = str(root / BUCKET)
        elif kind == "s3":
            env, url = stack.enter_context(rclone_s3(root)), f"s3://{BUCKET}"
        elif kind == "gcs":
            s3 = stack.enter_context(rclone_s3(root, auth=False))
            env = {"STORAGE_EMULATOR_HOST": s3["AWS_ENDPOINT_URL"], "GOOGLE_SKIP_SIGNATURE": "true"}
            url = f"gs://{BUCKET}"
        elif kind == "azure":
            command = shutil.which("azurite-blob")
            if command is None:
                pytest.skip("azurite-blob is not installed: npm install azurite")
            env, url = stack.enter_context(azurite(command, BUCKET)), f"az://{BUCKET}"
            _upload(root / BUCKET, env)
        elif kind in ("http-json", "http-html"):
            url = f"{stack.enter_context(folder_server(root, index=kind.removeprefix('http-'))).url}/{BUCKET}"
        elif kind == "http-manifest":
            keys = sorted(str(path.relative_to(root)) for path in (root / BUCKET).rglob("*.*"))
            lines = "".join(f"{key.removeprefix(f'{BUCKET}/')}\n" for key in keys)
            (root / BUCKET / "all.txt").write_text(lines)
            stack.callback((root / BUCKET / "all.txt").unlink)
            url = f"{stack.enter_context(folder_server(root, index='none')).url}/{BUCKET}/all.txt"
        elif kind == "sftp":
            env = {"HOME": str(tmp_path / "home")}
            url = f"{stack.enter_context(sftp_server(root, tmp_path / 'home'))}/{BUCKET}"
        else:
            env = {"HF_ENDPOINT": stack.enter_context(hub_server(root, page=1000)).url}
            url = f"hf://datasets/owner/name/{BUCKET}"
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield url


def _upload(folder: Path, env: dict[str, str]) -> None:
    from obstore.store import AzureStore

    store = AzureStore(
        BUCKET,
        account_name=env["AZURE_STORAGE_ACCOUNT_NAME"],
        account_key=env["AZURE_STORAGE_ACCOUNT_KEY"],
        endpoint=env["AZURE_STORAGE_ENDPOINT"],
        client_options={"allow_http": True},
    )
    for path in folder.rglob("*.*"):
        store.put(str(path.relative_to(folder)), path.read_bytes())


KINDS = ["local", "s3", "gcs", "azure", "http-json", "http-html", "http-manifest", "sftp", "hf"]


def digests(url: str, cache: Path, samples: int) -> list[str]:
    """Return the content digests of the shards of a complete pull, in order. One worker makes the order fixed."""
    with cachetool.open_cache(cache, max_size="100MB") as opened:
        result = opened.pull(url, all=True, workers=1, shard_size="100kB", seed=7)
        assert (result.samples, result.pass_complete) == (samples, True)
        return [json.loads((shard.path / "shard.json").read_bytes())["content"] for shard in opened.shards("default")]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return 100 samples, and the digests of a pull from their folder."""
    root = tmp_path_factory.mktemp("few")
    write_objects(root / BUCKET, 100)
    return root, digests(str(root / BUCKET), root / "cache", 100)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_pull_has_the_same_digests_from_every_place(
    kind: str, few: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, expected = few
    with served(kind, root, tmp_path, monkeypatch) as url:
        assert digests(url, tmp_path / "cache", 100) == expected
    assert len(expected) >= 2


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_2000_objects_have_the_same_digests_from_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_objects(tmp_path / "root" / BUCKET, 1000)
    found: dict[str, list[str]] = {}
    there = [kind for kind in KINDS if kind != "azure" or shutil.which("azurite-blob")]
    for kind in there:
        with monkeypatch.context() as patch, served(kind, tmp_path / "root", tmp_path / kind, patch) as url:
            found[kind] = digests(url, tmp_path / f"cache-{kind}", 1000)
            print(f"{kind}: {len(found[kind])} shards, the first {found[kind][0]}, the last {found[kind][-1]}")
    assert all(each == found["local"] for each in found.values())
    print(f"{len(found)} kinds of places, all alike")
