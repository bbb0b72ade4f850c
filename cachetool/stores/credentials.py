"""Credentials and endpoints of stores, read from the environment and each cloud's own files. cachetool stores none
itself.

Each function returns the options with which the client of an object store is made. The options are resolved here and
not in the client, so that a missing credential is one clear line. The client would ask the cloud's metadata address,
which hangs outside of that cloud. That address is used only if the environment asks for it
(``AWS_EC2_METADATA_DISABLED=false``, ``GCE_METADATA_HOST``, ``IDENTITY_ENDPOINT``/``MSI_ENDPOINT``).
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cachetool.core.errors import AccessDenied, UsageError
from cachetool.stores.origins import origin_of

__all__ = [
    "EXPIRES",
    "azure_options",
    "gcs_options",
    "hub_token_path",
    "identity_of",
    "marks",
    "netrc_path",
    "refuse_unsendable",
    "s3_options",
    "seconds_of",
]

Options = dict[str, str | bool]
Environment = Mapping[str, str]

EXPIRES = "expires"
"""Name of the option that says when the credentials expire, as an ISO 8601 date. The client does not get it."""
# Visible ASCII only. A header with a blank or a line end in a key could not be sent, or would add a header of its own.
_SENT = re.compile(r"[!-~]*")
_IN_HEADERS = frozenset(
    {
        *("region", "access_key_id", "secret_access_key", "session_token"),
        *("account_name", "account_key", "sas_key", "client_id", "client_secret", "tenant_id"),
    }
)


def _true(env: Environment, *names: str) -> bool:
    return any(env.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in names)


def _first(env: Environment, *names: str) -> str:
    return _named(env, *names)[1]


def _named(env: Environment, *names: str) -> tuple[str, str]:
    """Return the first variable of these that is set, and its value; two empty texts if none is set."""
    return next(((name, env[name].strip()) for name in names if env.get(name, "").strip()), ("", ""))


def _home(env: Environment) -> Path:
    return Path(env.get("HOME") or os.path.expanduser("~"))


def _endpoint(url: str, variable: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"{variable} must begin with http:// or https://; its value is not shown because it may be secret"
        )
    try:
        if not _SENT.fullmatch(url):
            raise UsageError("a blank or the like")
        origin_of(url)
    except UsageError:
        # Neither the value nor the cause is shown: an endpoint may hold user and password.
        raise UsageError(
            f"{variable} is not a URL: its host or its port cannot be read;"
            " its value is not shown because it may be secret"
        ) from None
    return url.rstrip("/")


def refuse_unsendable(place: str, options: Options) -> None:
    """Raise :class:`UsageError` for an option that no HTTP header can hold."""
    for name, value in options.items():
        # obstore would panic on such a value instead of raising an error.
        if name in _IN_HEADERS and isinstance(value, str) and not _SENT.fullmatch(value):
            raise UsageError(
                f"{name} for {place} contains a blank, a line end or another character that cannot be sent;"
                " its value is not shown"
            )


def netrc_path(env: Environment = os.environ) -> Path:
    """Return the path of the file with users and passwords of web servers."""
    return Path(env.get("NETRC") or _home(env) / ".netrc").expanduser()


def hub_token_path(env: Environment = os.environ) -> Path:
    """Return the path of the file with the token of the Hugging Face hub."""
    home = Path(env.get("HF_HOME") or _home(env) / ".cache" / "huggingface").expanduser()
    return Path(env.get("HF_TOKEN_PATH") or home / "token").expanduser()


def marks(env: Environment = os.environ) -> list[tuple[int, int] | None]:
    """Return the time of modification (ns) and the size (bytes) of each credentials file; None for a missing file.

    The list changes when a file changes.
    """
    files = [*_aws_files(env), _gcloud_file(env), netrc_path(env), hub_token_path(env)]
    files += [Path(env[name]).expanduser() for name in _POINTERS if env.get(name)]
    marks: list[tuple[int, int] | None] = []
    for path in files:
        try:
            # stat() and no read: a pull that waits for new credentials looks at all files once a second.
            status = path.stat()
            marks.append((status.st_mtime_ns, status.st_size))
        except OSError:
            marks.append(None)
    return marks


_POINTERS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AZURE_FEDERATED_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
)
"""Environment variables that name files of credentials."""


def identity_of(options: Options) -> object:
    """Return a value that is equal for equal credentials: the options, and the contents of the files that they name.

    If the client itself asks for credentials, the value equals no other, because each new client gets new ones.
    """
    given = {name: value for name, value in options.items() if name != EXPIRES}
    # The client asks the cloud (metadata address, container, CLI) whenever it is made again. So a new client is worth
    # one more try each time.
    if not given.keys() & _GIVEN:
        return object()
    for name in _FILES & given.keys():
        try:
            # The content counts, not the path: a mounted token file is replaced under the same name.
            given[name] = Path(str(given[name])).read_text(errors="surrogateescape")
        except OSError:
            given[name] = ""
    return given


_FILES = {"service_account", "application_credentials", "federated_token_file"}
_GIVEN = _FILES | {"skip_signature", "access_key_id", "service_account_key", "account_key", "sas_key", "client_secret"}


# --- S3 -------------------------------------------------------------------------------------------------------------


def s3_options(place: str, env: Environment = os.environ) -> Options:
    """Return the options of an S3 store. ``place`` is the URL for messages.

    Sources of credentials, in this order: ``AWS_SKIP_SIGNATURE``; keys in the environment; a container or web identity
    (left to the client); the profile (``AWS_PROFILE``, ``AWS_DEFAULT_PROFILE``) of the shared files.

    Raises:
        AccessDenied: If there are no credentials.
        UsageError: If the endpoint is no URL.
    """
    profile = _aws_profile(env)
    region = _first(env, "AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region", "") or "us-east-1"
    options: Options = {"region": region}
    if endpoint := _s3_endpoint(profile, region, env):
        options["endpoint"] = endpoint
        # Private servers know buckets by path. Their host name usually has no name for each bucket, so a virtual host
        # would not resolve.
        options["virtual_hosted_style_request"] = _true(env, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    if _true(env, "AWS_REQUEST_PAYER"):
        options["request_payer"] = True
    if _true(env, "AWS_SKIP_SIGNATURE"):
        return {**options, "skip_signature": True}
    key, secret = _first(env, "AWS_ACCESS_KEY_ID"), _first(env, "AWS_SECRET_ACCESS_KEY")
    token = _first(env, "AWS_SESSION_TOKEN")
    # Without this check a forgotten AWS_ACCESS_KEY_ID would silently select the keys of the profile.
    if bool(key) != bool(secret):
        missing = "AWS_SECRET_ACCESS_KEY" if key else "AWS_ACCESS_KEY_ID"
        raise AccessDenied(f"incomplete credentials for {place}: {missing} is not set")
    if not key:
        # These providers give temporary keys, which the client renews by itself. Keys read here would expire during a
        # long pull.
        if _first(env, *_AWS_PROVIDERS) or env.get("AWS_EC2_METADATA_DISABLED", "").strip().lower() == "false":
            return options
        key, secret = profile.get("aws_access_key_id", ""), profile.get("aws_secret_access_key", "")
        if key and secret and token:
            # The client would take this token from the environment and send it with the keys of the file, which S3
            # refuses.
            raise AccessDenied(
                f"AWS_SESSION_TOKEN is set without its keys; unset it to use the profile's keys for {place}"
            )
        token = profile.get("aws_session_token", "")
        if not (key and secret) and (command := _process_of(profile, env)):
            profile = _from_process(command, env)
            key, secret, token = (profile[name] for name in _KEYS)
        # With a known end, keys are read again before the store refuses them (see stores/login.py).
        if end := next((profile[name] for name in _ENDS if profile.get(name)), ""):
            options[EXPIRES] = end
    if not (key and secret):
        raise AccessDenied(_no_aws_credentials(place, profile, env))
    options |= {"access_key_id": key, "secret_access_key": secret}
    return {**options, "session_token": token} if token else options


def _s3_endpoint(profile: Mapping[str, str], region: str, env: Environment) -> str:
    """Return the endpoint, searched in the order of boto3; empty for AWS itself.

    The order: environment variables (the one for S3 alone first), the section of services that the profile names, the
    profile.
    """
    variable, named = _named(env, *_ENDPOINTS)
    if _true(env, _IGNORE) or _true(profile, _IGNORE.removeprefix("AWS_").lower()):
        # The client reads the variable by itself, so it must be given the address of AWS to ignore the variable.
        return f"https://s3.{region}.amazonaws.com" if named else ""
    if named:
        return _endpoint(named, variable)
    if section := profile.get("services", "").strip():
        path, _ = _aws_files(env)
        services = _section(path, f"services {section}")
        if services is None:
            raise AccessDenied(
                f"profile {_profile_name(env)!r} names the services {section!r}, but {str(path)!r} has no section"
                f" [services {section}]"
            )
        pairs = (line.partition("=") for line in services.get("s3", "").splitlines())
        if named := next((value.strip() for name, _, value in pairs if name.strip() == "endpoint_url"), ""):
            return _endpoint(named, f"endpoint_url of s3 in [services {section}]")
    named = profile.get("endpoint_url", "").strip()
    return _endpoint(named, f"endpoint_url of profile {_profile_name(env)!r}") if named else ""


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_IGNORE = "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"
_PROFILES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")


def _profile_name(env: Environment) -> str:
    return _first(env, *_PROFILES) or "default"


_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_ENDS = ("aws_expiration", "expiration", "x_security_token_expires")
"""Names under which programs write the end of temporary keys into the credentials file."""
_ELSEWHERE = ("role_arn", "login_session")
_PROCESS_SECONDS = 60.0


def _process_of(profile: Mapping[str, str], env: Environment) -> Sequence[str]:
    """Return the command that prints the keys of a profile; empty if there is none.

    For a profile with roles or single sign-on the command is the cloud's own program, if that is installed.
    """
    name = _profile_name(env)
    if command := profile.get("credential_process"):
        try:
            return shlex.split(command)
        except ValueError:
            raise AccessDenied(
                f"credential_process of profile {name!r} is not a command: a quote is not closed"
            ) from None
    needs_aws = any(key.startswith("sso_") or key in _ELSEWHERE for key in profile)
    # Roles and single sign-on need requests to other services of AWS, with caches of their own. The AWS command line
    # does all of this and prints plain keys.
    if needs_aws and (program := shutil.which("aws", path=env.get("PATH", ""))):
        return [program, "configure", "export-credentials", "--profile", name, "--format", "process"]
    return ()


def _from_process(command: Sequence[str], env: Environment) -> dict[str, str]:
    """Return the keys that a command prints, named as those of a profile."""
    begins = f"{command[0]!r}, which gives the keys of profile {_profile_name(env)!r},"
    try:
        done = subprocess.run(
            command,
            # A program that asks a question gets the end of its input at once; otherwise it would wait unseen until the
            # time limit.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # Neither output is quoted or passed on, because a program may print secrets in both.
            stderr=subprocess.DEVNULL,
            timeout=_PROCESS_SECONDS,
            env=dict(env),
        )
    except OSError as error:
        raise AccessDenied(f"{begins} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise AccessDenied(f"{begins} did not end within {_PROCESS_SECONDS:.0f} s") from None
    if done.returncode:
        raise AccessDenied(f"{begins} ended with code {done.returncode}; run it to see why, or log in again")
    try:
        said: Any = json.loads(done.stdout)
        names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
        keys = {ours: str(said.get(theirs) or "") for ours, theirs in zip(_KEYS, names, strict=True)}
        end = str(said.get("Expiration") or "")
    # Safe to suppress: text that is no JSON object counts as no keys, which is refused below without quoting the text.
    except (ValueError, AttributeError, RecursionError):
        keys, end = {}, ""
    if not (keys.get(_KEYS[0]) and keys.get(_KEYS[1])):
        raise AccessDenied(f"{begins} did not print keys in JSON (Version 1, AccessKeyId, SecretAccessKey)")
    return {**keys, _ENDS[0]: end}


def seconds_of(date: str) -> float | None:
    """Return the time of an ISO 8601 date in seconds of :func:`time.time`; None if the text is no date."""
    try:
        return datetime.fromisoformat(date).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        return None


_AWS_PROVIDERS = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


def _no_aws_credentials(place: str, profile: Mapping[str, str], env: Environment) -> str:
    if any(name.startswith("sso_") or name in _ELSEWHERE for name in profile):
        name = _profile_name(env)
        return (
            f"profile {name!r} has no keys of its own for {place}; put keys into the environment with:\n"
            f'eval "$(aws configure export-credentials --profile {name} --format env)"'
        )
    return (
        f"no credentials for {place}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,\n"
        "or AWS_SKIP_SIGNATURE=true for public data, or AWS_EC2_METADATA_DISABLED=false on an EC2 instance"
    )


def _aws_profile(env: Environment) -> dict[str, str]:
    """Return the values of the profile in the shared config and credentials files; the credentials file wins."""
    config, keys = _aws_files(env)
    wanted = _profile_name(env)
    in_config = _section(config, "default" if wanted == "default" else f"profile {wanted}")
    in_keys = _section(keys, wanted)
    variable = next((name for name in _PROFILES if _first(env, name)), "")
    if variable and in_config is None and in_keys is None:
        raise AccessDenied(f"no profile {wanted!r} ({variable}) in {str(keys)!r} or {str(config)!r}")
    return {**(in_config or {}), **(in_keys or {})}


def _aws_files(env: Environment) -> tuple[Path, Path]:
    """Return the paths of the shared config file and the shared credentials file."""
    folder = _home(env) / ".aws"
    config = env.get("AWS_CONFIG_FILE") or folder / "config"
    return Path(config).expanduser(), Path(
        env.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials"
    ).expanduser()


def _section(path: Path, name: str) -> dict[str, str] | None:
    # Raw, because secrets hold `%` signs, which interpolation would replace. The section `default` is an ordinary
    # profile in these files. configparser would copy its keys into every other profile, so its own default section gets
    # another name.
    parser = configparser.RawConfigParser(default_section="\0", strict=False)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise AccessDenied(f"credentials file {str(path)!r} cannot be read: {error.strerror}") from error
    # Not chained: the parser's message quotes the line, which may be a secret.
    except (configparser.Error, UnicodeDecodeError):
        raise AccessDenied(f"credentials file {str(path)!r} is not in the INI format the AWS tools use") from None
    return dict(parser[name]) if parser.has_section(name) else None


# --- GCS ------------------------------------------------------------------------------------------------------------


def gcs_options(place: str, env: Environment = os.environ) -> Options:
    """Return the options of a Google Cloud Storage store. ``place`` is the URL for messages.

    Sources of credentials, in this order: ``GOOGLE_SKIP_SIGNATURE``, a service account,
    ``GOOGLE_APPLICATION_CREDENTIALS``, the file of ``gcloud auth application-default login`` in the home folder.

    Raises:
        AccessDenied: If there are no credentials.
    """
    options: Options = {}
    variable, host = _named(env, "GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST")
    if host:
        options["base_url"] = _endpoint(host if "://" in host else f"http://{host}", variable)
    if _true(env, "GOOGLE_SKIP_SIGNATURE"):
        return {**options, "skip_signature": True}
    if text := _first(env, "GOOGLE_SERVICE_ACCOUNT_KEY"):
        return {**options, "service_account_key": text}
    variable, path = _named(env, "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
    if path:
        return {**options, "service_account": _existing(path, variable)}
    if path := _first(env, "GOOGLE_APPLICATION_CREDENTIALS"):
        return {**options, "application_credentials": _existing(path, "GOOGLE_APPLICATION_CREDENTIALS")}
    default = _gcloud_file(env)
    # Checked here, because the client would continue to the metadata address if the file is missing, and hang outside
    # of Google Cloud.
    if default.is_file():
        return {**options, "application_credentials": str(default)}
    if _first(env, "GCE_METADATA_HOST"):
        return options
    raise AccessDenied(
        f"no credentials for {place}: set GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SKIP_SIGNATURE=true for public data,\n"
        "or GCE_METADATA_HOST on Google Cloud, or run 'gcloud auth application-default login'"
    )


def _gcloud_file(env: Environment) -> Path:
    """Return the path of the file that ``gcloud auth application-default login`` writes."""
    folder = Path(env.get("CLOUDSDK_CONFIG") or _home(env) / ".config" / "gcloud")
    return folder / "application_default_credentials.json"


def _existing(path: str, variable: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise AccessDenied(f"{variable} names {path!r}, which does not exist or is not a file")
    return str(file)


# --- Azure ----------------------------------------------------------------------------------------------------------


def azure_options(place: str, account: str = "", env: Environment = os.environ) -> Options:
    """Return the options of an Azure Blob store. ``account`` is the account in the URL, or empty.

    Raises:
        AccessDenied: If the account or a credential is missing.
    """
    given = _connection_string(_first(env, "AZURE_STORAGE_CONNECTION_STRING"))
    name = account or _first(env, "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT") or given.get("accountname", "")
    if not name:
        raise AccessDenied(
            f"no storage account for {place}: set AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING,\n"
            "or name it in the URL: abfss://container@account.dfs.core.windows.net/path"
        )
    options: Options = {"account_name": name}
    variable, endpoint = _named(env, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    if not endpoint:
        variable, endpoint = "BlobEndpoint of AZURE_STORAGE_CONNECTION_STRING", given.get("blobendpoint", "")
    if endpoint:
        options["endpoint"] = _endpoint(endpoint, variable)
    if _true(env, "AZURE_SKIP_SIGNATURE"):
        return {**options, "skip_signature": True}
    key = _first(env, *_AZURE_KEYS) or given.get("accountkey", "")
    sas = _first(env, "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN") or given.get("sharedaccesssignature", "")
    if key:
        return {**options, "account_key": key}
    if sas:
        return {**options, "sas_key": sas}
    ids = {
        "client_id": _first(env, "AZURE_CLIENT_ID"),
        "client_secret": _first(env, "AZURE_CLIENT_SECRET"),
        "tenant_id": _first(env, "AZURE_TENANT_ID"),
        "federated_token_file": _first(env, "AZURE_FEDERATED_TOKEN_FILE"),
    }
    # All parts must be there: with some of them the client would fall back to the metadata address.
    if ids["client_id"] and ids["tenant_id"] and (ids["client_secret"] or ids["federated_token_file"]):
        return {**options, **{name: value for name, value in ids.items() if value}}
    if _true(env, "AZURE_USE_AZURE_CLI"):
        return {**options, "use_azure_cli": True}
    if _first(env, "IDENTITY_ENDPOINT", "MSI_ENDPOINT"):
        return options
    raise AccessDenied(
        f"no credentials for {place}: set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or\n"
        "AZURE_STORAGE_CONNECTION_STRING, or AZURE_USE_AZURE_CLI=true, or AZURE_SKIP_SIGNATURE=true for public data"
    )


_AZURE_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCESS_KEY")


def _connection_string(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(";") if part.strip())
    # Only the first `=` separates, because a key in base64 ends with `=`.
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
