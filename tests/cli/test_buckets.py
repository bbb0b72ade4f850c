"""Buckets in practice: keys that are not paths, compressed objects, AWS config files with service sections."""

from __future__ import annotations

import gzip
import io
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.servers import folder_server

if TYPE_CHECKING:
    from tests.cli.conftest import Run
    from tests.servers import Moto


def npy(value: int = 0) -> bytes:
    out = io.BytesIO()
    np.save(out, np.full(3, value))
    return out.getvalue()


@pytest.mark.parametrize("key", ["d//c.npy", "d/x/../c.npy", "d/./c.npy", "d/\x01.npy", "d/c.npy/"])
def test_a_key_that_is_no_path_is_skipped_and_named_with_the_option_from_the_error(
    run: Run, moto: Moto, key: str
) -> None:
    bucket = f"cli-{key.encode().hex()}"
    moto.put(bucket, {"d/a.npy": npy(), "d/b.npy": npy(1), key: npy(2)})
    pull = ["pull", f"s3://{bucket}/d/", "--all", "--max-size", "20MB"]
    env = dict(moto.env)

    refused = run(*pull, env=env)
    assert refused.code == 3
    words = shlex.split(refused.error.replace("'", ""))
    option = words[words.index("--on-error") :][:2]
    assert option == ["--on-error", "skip"]

    ran = run(*pull, *option, "--json", env=env)
    assert ran.code == 0, ran.stderr
    assert ran.document["samples"] == 2
    [[name, why]] = ran.document["left_out"]
    assert name == key.removeprefix("d/").replace("\x01", "\\x01")
    assert "cannot be requested" in why
    assert f"left out: {name}" in ran.stderr

    converted = run("convert", f"s3://{bucket}/d/", "--to", "hdf5", "--out", "out", "--json", *option, env=env)
    assert (converted.document["samples"], converted.document["skipped"]) == (2, [[name, why]])
    assert run("convert", f"s3://{bucket}/d/", "--to", "hdf5", "--out", "out2", env=env).code == 3


def test_keys_that_are_no_paths_are_also_skipped_among_files_of_many_samples(run: Run, moto: Moto) -> None:
    moto.put("cli-files", {"d/a.npy": npy(), "d//b.npy": npy(1)})

    ran = run(
        "pull", "s3://cli-files/d", "--all", "--read-as", "files", "--on-error", "skip", "--json", "--max-size", "20MB",
        env=dict(moto.env),
    )  # fmt: skip

    assert ran.document["samples"] == 3, ran.stderr
    assert [name for name, _ in ran.document["left_out"]] == ["/b.npy"]


@pytest.mark.parametrize("verb", ["pull", "convert"])
@pytest.mark.parametrize("name", ["a.json", "a.bin", "a.npy", "rows.h5", "x.tar"])
def test_a_compressed_object_is_named_with_its_encoding_and_the_advice_works(
    run: Run, moto: Moto, tmp_path: Path, verb: str, name: str
) -> None:
    bodies = {"a.json": b'{"a": 1}', "a.bin": b"x" * 50, "a.npy": npy()}
    if name not in bodies:
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "s.npy").write_bytes(npy())
        if name == "x.tar":
            import tarfile

            with tarfile.open(tmp_path / name, "w") as archive:
                archive.add(tmp_path / "one" / "s.npy", "s.npy")
        else:
            import h5py

            with h5py.File(tmp_path / name, "w") as file:
                file["x"] = np.arange(5)
        bodies[name] = (tmp_path / name).read_bytes()
    moto.put("cli-packed", {})
    key = f"{verb}/{name.partition('.')[2]}/{name}"
    moto.client.put_object(Bucket="cli-packed", Key=key, Body=gzip.compress(bodies[name]), ContentEncoding="gzip")
    url = f"s3://cli-packed/{key}" if name in ("rows.h5", "x.tar") else f"s3://cli-packed/{key.rpartition('/')[0]}/"
    how = {"pull": ["--all", "--max-size", "20MB"], "convert": ["--to", "lmdb", "--out", "out"]}[verb]

    ran = run(verb, url, *how, env=dict(moto.env))

    assert ran.code == 3, ran.stdout
    assert "Content-Encoding: gzip" in ran.error
    assert name in ran.error
    # "copy such objects to a folder and unpack them there"
    (tmp_path / "copy").mkdir()
    packed = moto.client.get_object(Bucket="cli-packed", Key=key)["Body"].read()
    (tmp_path / "copy" / name).write_bytes(gzip.decompress(packed))
    done = run(verb, tmp_path / "copy", *how)
    assert done.code == 0, done.stderr


def test_a_few_compressed_objects_are_skipped_and_named(run: Run, moto: Moto) -> None:
    moto.put("cli-few", {f"{number:03}.json": b'{"a": 1}' for number in range(20)})
    moto.client.put_object(Bucket="cli-few", Key="020.json", Body=gzip.compress(b"{}"), ContentEncoding="gzip")

    ran = run("pull", "s3://cli-few", "--all", "--on-error", "skip", "--json", "--max-size", "20MB", env=dict(moto.env))

    assert (ran.document["samples"], ran.document["skipped"]) == (20, 1)
    [skip] = ran.document["skipped_examples"]
    assert skip["key"] == "020"
    assert "gzip" in skip["reason"]


@pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
def test_the_endpoint_of_a_profiles_services_section_is_used(
    run: Run, moto: Moto, tmp_path: Path, variable: str
) -> None:
    moto.put("cli-services", {"a.npy": npy()})
    (tmp_path / "config").write_text(
        f"[profile p]\nregion = us-east-1\naws_access_key_id = {moto.env['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {moto.env['AWS_SECRET_ACCESS_KEY']}\nservices = here\n"
        f"[services here]\ns3 =\n  endpoint_url = {moto.env['AWS_ENDPOINT_URL']}\n"
    )
    env = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        variable: "p",
        "https_proxy": "http://127.0.0.1:9",  # keeps the SDK off the network
    }

    ran = run("pull", "s3://cli-services", "--all", "--json", "--max-size", "20MB", env=env)

    assert ran.code == 0, ran.stderr
    assert ran.document["samples"] == 1
    assert moto.env["AWS_SECRET_ACCESS_KEY"] not in json.dumps(ran.document) + ran.stderr


@pytest.mark.parametrize("line", ["./d.npy", "k" * 5000 + ".npy"], ids=["dot", "long"])
def test_an_invalid_name_in_a_manifest_is_skipped_and_named(run: Run, tmp_path: Path, line: str) -> None:
    (tmp_path / "web").mkdir()
    for number in range(3):
        (tmp_path / "web" / f"{number}.npy").write_bytes(npy(number))
    (tmp_path / "web" / "list.txt").write_text(f"0.npy\n1.npy\n2.npy\n{line}\n")
    with folder_server(tmp_path / "web", index="none") as server:
        pull = ["pull", f"{server.url}/list.txt", "--all", "--max-size", "20MB", "--json"]
        refused = run(*pull)
        assert refused.code == 3
        assert "--on-error skip" in refused.stderr

        ran = run(*pull, "--on-error", "skip")

    assert ran.document["samples"] == 3, ran.stderr
    names = [name for name, _ in ran.document["left_out"]] + [skip["key"] for skip in ran.document["skipped_examples"]]
    assert len(names) == 1
