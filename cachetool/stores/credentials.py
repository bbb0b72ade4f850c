"""Where credentials and endpoints come from: the environment and each cloud's own files, never cachetool's.

Each function gives the options that the object-store client is made with. They are resolved here, not in the client,
so that a missing credential is one clear line: left alone, the client asks the cloud's metadata address, which outside
that cloud hangs. That address is used only when the environment asks for it (``AWS_EC2_METADATA_DISABLED=false``,
``GCE_METADATA_HOST``, ``IDENTITY_ENDPOINT``/``MSI_ENDPOINT``).
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
"""Among the options: when the credentials end, as an ISO 8601 date; not for the client."""
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
    return next((env[name].strip() for name in names if env.get(name, "").strip()), "")


def _home(env: Environment) -> Path:
    return Path(env.get("HOME") or os.path.expanduser("~"))


def _endpoint(url: str, variable: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{variable} must begin with http:// or https://; its value, which is not shown, does not")
    try:
        if not _SENT.fullmatch(url):
            raise UsageError("a blank or the like")
        origin_of(url)
    except UsageError:
        raise UsageError(f"{variable} is no URL: its host or its port cannot be read; it is not shown") from None
    return url.rstrip("/")


def refuse_unsendable(place: str, options: Options) -> None:
    """Raise :class:`UsageError` for what no header can hold: the client of object stores would panic."""
    for name, value in options.items():
        if name in _IN_HEADERS and isinstance(value, str) and not _SENT.fullmatch(value):
            raise UsageError(f"{name} for {place} has a blank, a line end or the like in it; it is not shown")


def netrc_path(env: Environment = os.environ) -> Path:
    """The file of users and passwords of web servers."""
    return Path(env.get("NETRC") or _home(env) / ".netrc").expanduser()


def hub_token_path(env: Environment = os.environ) -> Path:
    """The file with the token of the Hugging Face hub."""
    home = Path(env.get("HF_HOME") or _home(env) / ".cache" / "huggingface").expanduser()
    return Path(env.get("HF_TOKEN_PATH") or home / "token").expanduser()


def marks(env: Environment = os.environ) -> list[tuple[int, int] | None]:
    """When each file of credentials was written, and its size: another value once one has changed. None stands for a
    file that is not there."""
    files = [*_aws_files(env), _gcloud_file(env), netrc_path(env), hub_token_path(env)]
    files += [Path(env[name]).expanduser() for name in _POINTERS if env.get(name)]
    marks: list[tuple[int, int] | None] = []
    for path in files:
        try:
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
"""Variables of the environment that name such files."""


def identity_of(options: Options) -> object:
    """What tells these credentials from others: the options, and the contents of the files that they name. Never equal
    where the client itself asks for them: it has new ones whenever it is made anew."""
    given = {name: value for name, value in options.items() if name != EXPIRES}
    if not given.keys() & _GIVEN:
        return object()
    for name in _FILES & given.keys():
        try:
            given[name] = Path(str(given[name])).read_text(errors="surrogateescape")
        except OSError:
            given[name] = ""
    return given


_FILES = {"service_account", "application_credentials", "federated_token_file"}
_GIVEN = _FILES | {"skip_signature", "access_key_id", "service_account_key", "account_key", "sas_key", "client_secret"}


# --- S3 -------------------------------------------------------------------------------------------------------------


def s3_options(place: str, env: Environment = os.environ) -> Options:
    """Options of an S3 store.

    ``place`` is the URL to name in a message. Order: ``AWS_SKIP_SIGNATURE``; keys in the environment; what a container
    or a web identity gives (left to the client); the profile (``AWS_PROFILE``, ``AWS_DEFAULT_PROFILE``) of the shared
    files. Raises :class:`AccessDenied` when there is none of these, :class:`UsageError` for an endpoint that is no URL.
    """
    profile = _aws_profile(env)
    region = _first(env, "AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region", "") or "us-east-1"
    options: Options = {"region": region}
    if endpoint := _s3_endpoint(profile, region, env):
        options["endpoint"] = endpoint
        # Servers of one's own know buckets by path; their host name has no name per bucket.
        options["virtual_hosted_style_request"] = _true(env, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    if _true(env, "AWS_REQUEST_PAYER"):
        options["request_payer"] = True
    if _true(env, "AWS_SKIP_SIGNATURE"):
        return {**options, "skip_signature": True}
    key, secret = _first(env, "AWS_ACCESS_KEY_ID"), _first(env, "AWS_SECRET_ACCESS_KEY")
    token = _first(env, "AWS_SESSION_TOKEN")
    if bool(key) != bool(secret):
        missing = "AWS_SECRET_ACCESS_KEY" if key else "AWS_ACCESS_KEY_ID"
        raise AccessDenied(f"incomplete credentials for {place}: {missing} is not set")
    if not key:
        if _first(env, *_AWS_PROVIDERS) or env.get("AWS_EC2_METADATA_DISABLED", "").strip().lower() == "false":
            return options
        key, secret = profile.get("aws_access_key_id", ""), profile.get("aws_secret_access_key", "")
        if key and secret and token:
            # The client would take the token from the environment and send it with the keys of the file.
            raise AccessDenied(
                f"AWS_SESSION_TOKEN is set without its keys; unset it to use the profile's keys for {place}"
            )
        token = profile.get("aws_session_token", "")
        if not (key and secret) and (command := _process_of(profile, env)):
            profile = _from_process(command, env)
            key, secret, token = (profile[name] for name in _KEYS)
        if end := next((profile[name] for name in _ENDS if profile.get(name)), ""):
            options[EXPIRES] = end
    if not (key and secret):
        raise AccessDenied(_no_aws_credentials(place, profile, env))
    options |= {"access_key_id": key, "secret_access_key": secret}
    return {**options, "session_token": token} if token else options


def _s3_endpoint(profile: Mapping[str, str], region: str, env: Environment) -> str:
    """The endpoint in the order of boto3: variables of the environment, that of S3 alone first; the section of services
    that the profile names; the profile. Empty for AWS itself."""
    named = _first(env, *_ENDPOINTS)
    if _true(env, _IGNORE) or _true(profile, _IGNORE.removeprefix("AWS_").lower()):
        # The client would take the variable by itself.
        return f"https://s3.{region}.amazonaws.com" if named else ""
    if named:
        return _endpoint(named, next(name for name in _ENDPOINTS if _first(env, name)))
    if section := profile.get("services", "").strip():
        path, _ = _aws_files(env)
        services = _section(path, f"services {section}")
        if services is None:
            raise AccessDenied(
                f"profile {_profile_name(env)!r} names the services {section!r}, and {str(path)!r} has no section"
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
"""Names that programs which write temporary keys into the credentials file give to their end."""
_ELSEWHERE = ("role_arn", "login_session")
_PROCESS_SECONDS = 60.0


def _process_of(profile: Mapping[str, str], env: Environment) -> Sequence[str]:
    """The program that gives the keys of a profile; of one with roles or single sign-on the cloud's own, if it is
    there. Empty where there is none."""
    name = _profile_name(env)
    if command := profile.get("credential_process"):
        try:
            return shlex.split(command)
        except ValueError:
            raise AccessDenied(f"credential_process of profile {name!r} is no command: a quote is not closed") from None
    needs_aws = any(key.startswith("sso_") or key in _ELSEWHERE for key in profile)
    if needs_aws and (program := shutil.which("aws", path=env.get("PATH", ""))):
        return [program, "configure", "export-credentials", "--profile", name, "--format", "process"]
    return ()


def _from_process(command: Sequence[str], env: Environment) -> dict[str, str]:
    """The keys that a program prints, as those of a profile. Nothing that it says is quoted: it may be a secret."""
    begins = f"{command[0]!r}, which gives the keys of profile {_profile_name(env)!r},"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
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
    except (ValueError, AttributeError, RecursionError):
        keys, end = {}, ""
    if not (keys.get(_KEYS[0]) and keys.get(_KEYS[1])):
        raise AccessDenied(f"{begins} did not print keys in JSON (Version 1, AccessKeyId, SecretAccessKey)")
    return {**keys, _ENDS[0]: end}


def seconds_of(date: str) -> float | None:
    """The moment that an ISO 8601 date names, in seconds of :func:`time.time`; None for what is no date."""
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
            f"profile {name!r} has no keys of its own, which {place} needs; put them into the environment with:\n"
            f'eval "$(aws configure export-credentials --profile {name} --format env)"'
        )
    return (
        f"no credentials for {place}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,\n"
        "or AWS_SKIP_SIGNATURE=true for public data, or AWS_EC2_METADATA_DISABLED=false on an EC2 instance"
    )


def _aws_profile(env: Environment) -> dict[str, str]:
    """What the shared credentials and config files say of the profile; the credentials file wins."""
    config, keys = _aws_files(env)
    wanted = _profile_name(env)
    in_config = _section(config, "default" if wanted == "default" else f"profile {wanted}")
    in_keys = _section(keys, wanted)
    variable = next((name for name in _PROFILES if _first(env, name)), "")
    if variable and in_config is None and in_keys is None:
        raise AccessDenied(f"no profile {wanted!r} ({variable}) in {str(keys)!r} or {str(config)!r}")
    return {**(in_config or {}), **(in_keys or {})}


def _aws_files(env: Environment) -> tuple[Path, Path]:
    """The shared config and credentials files."""
    folder = _home(env) / ".aws"
    config = env.get("AWS_CONFIG_FILE") or folder / "config"
    return Path(config).expanduser(), Path(
        env.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials"
    ).expanduser()


def _section(path: Path, name: str) -> dict[str, str] | None:
    # Interpolation off: secrets hold % signs. The default section is an ordinary one in these files.
    parser = configparser.RawConfigParser(default_section="\0", strict=False)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise AccessDenied(f"credentials file {str(path)!r} cannot be read: {error.strerror}") from error
    except (configparser.Error, UnicodeDecodeError):
        # Not chained: the parser's message quotes the line, which may be a secret.
        raise AccessDenied(f"credentials file {str(path)!r} is not in the INI format the AWS tools use") from None
    return dict(parser[name]) if parser.has_section(name) else None


# --- GCS ------------------------------------------------------------------------------------------------------------


def gcs_options(place: str, env: Environment = os.environ) -> Options:
    """Options of a Google Cloud Storage store: ``GOOGLE_SKIP_SIGNATURE``, a service account or
    ``GOOGLE_APPLICATION_CREDENTIALS``, else what ``gcloud auth application-default login`` left in the home folder.

    Raises :class:`AccessDenied` when there is none of these.
    """
    options: Options = {}
    host = _first(env, "GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST")
    if host:
        options["base_url"] = _endpoint(host if "://" in host else f"http://{host}", "STORAGE_EMULATOR_HOST")
    if _true(env, "GOOGLE_SKIP_SIGNATURE"):
        return {**options, "skip_signature": True}
    if text := _first(env, "GOOGLE_SERVICE_ACCOUNT_KEY"):
        return {**options, "service_account_key": text}
    if path := _first(env, "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"):
        return {**options, "service_account": _existing(path, "GOOGLE_SERVICE_ACCOUNT")}
    if path := _first(env, "GOOGLE_APPLICATION_CREDENTIALS"):
        return {**options, "application_credentials": _existing(path, "GOOGLE_APPLICATION_CREDENTIALS")}
    default = _gcloud_file(env)
    if default.is_file():
        return {**options, "application_credentials": str(default)}
    if _first(env, "GCE_METADATA_HOST"):
        return options
    raise AccessDenied(
        f"no credentials for {place}: set GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SKIP_SIGNATURE=true for public data,\n"
        "or GCE_METADATA_HOST on Google Cloud, or run 'gcloud auth application-default login'"
    )


def _gcloud_file(env: Environment) -> Path:
    """What ``gcloud auth application-default login`` writes."""
    folder = Path(env.get("CLOUDSDK_CONFIG") or _home(env) / ".config" / "gcloud")
    return folder / "application_default_credentials.json"


def _existing(path: str, variable: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise AccessDenied(f"{variable} names {path!r}, which is no file")
    return str(file)


# --- Azure ----------------------------------------------------------------------------------------------------------


def azure_options(place: str, account: str = "", env: Environment = os.environ) -> Options:
    """Options of an Azure Blob store. ``account`` is the one the URL names, if it does.

    Raises :class:`AccessDenied` when the account or a credential is missing.
    """
    given = _connection_string(_first(env, "AZURE_STORAGE_CONNECTION_STRING"))
    name = account or _first(env, "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT") or given.get("accountname", "")
    if not name:
        raise AccessDenied(
            f"no storage account for {place}: set AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING,\n"
            "or name it in the URL: abfss://container@account.dfs.core.windows.net/path"
        )
    options: Options = {"account_name": name}
    endpoint = _first(env, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT") or given.get("blobendpoint", "")
    if endpoint:
        options["endpoint"] = _endpoint(endpoint, "AZURE_STORAGE_ENDPOINT")
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
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
