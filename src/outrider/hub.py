"""Can the model hub be reached? Checked within seconds, before its client retries for half a minute."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from .params import InputError, first_line

LONGEST = 96  # characters of a hub id
PATIENCE = 3.0  # seconds until the hub counts as out of reach


def ensure(name: str, hint: str = "") -> bool:
    """Can the model or drafter of this name be read: from its folder, from the hub, or from the hub's cache?

    Args:
        name: a folder, or a hub id such as "org/model".
        hint: what else the user can do, for the error.

    Returns:
        False where only the hub's cache is left, because the hub is out of reach; else True.

    Raises:
        InputError: there is no such folder, and the name cannot be a hub id; or its cache does not hold the name, and
            the hub does not have it or is out of reach.
    """
    if Path(name).exists():
        return True
    if not is_id(name):
        raise InputError(f"there is no folder {name}; check the path, or give a hub id such as org/model")
    if cached(name):
        return not offline() and reachable(_url())
    if offline():
        hint = hint or "check the name, or unset HF_HUB_OFFLINE"
        raise InputError(f"{name} is neither a folder nor in the hub's cache, and HF_HUB_OFFLINE is set; {hint}")
    if not reachable(_url()):
        hint = hint or "check the name and the network"
        raise InputError(f"{name} is neither a folder nor in the cache, and the hub is out of reach; {hint}")
    if not known(name):
        raise InputError(f"{name} is neither a folder nor on the hub ({_url()}); check the name")
    return True


def folder(name: str, hint: str, patterns: Sequence[str]) -> Path:
    """The folder in the hub's cache that holds a repository's files of these patterns, which are fetched if need be.

    Raises:
        InputError: as `ensure`; or they cannot be fetched.
    """
    offline_now = not ensure(name, hint)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=offline_now))
    except MemoryError:
        raise
    except Exception as error:  # the hub's client, and the library below it, have many types of their own
        raise InputError(f"{name} cannot be fetched from the hub: {first_line(error)}") from None


def _url() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def is_id(name: str) -> bool:
    """Can this be a hub id, such as "gpt2" or "org/model"? Not a path of more parts, nor what the hub refuses."""
    part = r"\w(?:[\w.-]*\w)?"
    wrong = "--" in name or ".." in name or name.endswith(".git") or len(name) > LONGEST
    return bool(re.fullmatch(rf"{part}(/{part})?", name, re.ASCII)) and not wrong


def offline() -> bool:
    """Has the user turned the hub off (HF_HUB_OFFLINE=1)?"""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off")


def cached(name: str) -> bool:
    """Does the hub's cache hold the config of this hub id?"""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def known(name: str) -> bool:
    """Does the hub, which can be reached, have a repository of this name? True also without an answer: loading it then
    reports why."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=PATIENCE)
    except GatedRepoError:
        return True
    except RepositoryNotFoundError:
        return False
    except Exception:
        return True
    return True


def reachable(url: str) -> bool:
    """Does the host of `url`, or the proxy before it, take a connection within `PATIENCE` seconds?"""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or (80 if parts.scheme == "http" else 443)
    connected: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), timeout=PATIENCE).close()
            connected.append(True)
        except OSError:
            pass

    trial = Thread(target=connect, daemon=True)  # looking up a name has no time limit of its own
    trial.start()
    trial.join(PATIENCE)
    return bool(connected)
