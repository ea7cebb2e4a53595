"""Where a checkpoint is: a local directory, or an id on the Hugging Face hub."""

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt"]


def resolve(source: str | Path) -> Path:
    """The directory of a checkpoint; `organisation/name`, where it is no directory, is downloaded from the hub.

    Raises FileNotFoundError if there is no such directory, ValueError if it is a file, or the hub does not give it.
    """
    text = str(source)
    directory = Path(text).expanduser()
    if text.strip() and os.path.isdir(directory):  # which, unlike Path's, says no where it may not look
        return directory
    if text.strip() and os.path.exists(directory):
        raise ValueError(f"{text} is a file: give the directory that holds the checkpoint")
    if not _HUB_ID.fullmatch(text):
        raise FileNotFoundError(
            f"no such directory: {text!r} (expected a checkpoint's directory, or a Hugging Face id such as"
            " GSAI-ML/LLaDA-8B-Instruct)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=_WANTED))
    except Exception as error:  # no network, no such model, no permission: the hub's many classes say it in words
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"no such directory: {text}, and the Hugging Face hub could not be reached or does not have it: {reason}"
        ) from error
