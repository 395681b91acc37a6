"""The hub: asked once and briefly, before transformers asks for every file again and again."""

from __future__ import annotations

from pathlib import Path

from tensorlens.errors import LoadError
from tensorlens.models.bundled import BUNDLED, near_names

PATIENCE_SECONDS = 5.0
"""How long the hub may take to say that it is there."""


def ask_hub(name: str) -> Path | None:
    """Ask the hub once for the model `name`; the folder of an earlier download if it does not answer.

    Raises:
        LoadError: It is not on the hub, or the hub does not answer and there is no copy here.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=PATIENCE_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise not_on_hub(name, error) from error
    except HfHubHTTPError:
        return None  # an answer of another kind, such as that of a proxy; transformers will say what it is
    except Exception as error:  # what says that nobody answers changes with the library behind the hub's
        copy = try_to_load_from_cache(name, "config.json")
        if not isinstance(copy, str):
            raise not_on_hub(name, error) from error
        return Path(copy).parent
    return None


def not_on_hub(name: str, error: BaseException) -> LoadError:
    """What to say of a name that the hub did not know, or could not be asked about."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return LoadError(f"The hub holds {name!r}, but behind an agreement. Accept it there, then run `hf auth login`.")
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        what = "the hub has no public model of this name"
    elif isinstance(error, (ValueError, KeyError)) and not isinstance(error, OSError):
        what = f"its configuration could not be read ({error})"
    else:
        what = "the hub could not be reached or has no such model"
    near = near_names(name.split("/")[-1])
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return LoadError(
        f"{name!r} is neither a bundled model ({', '.join(BUNDLED)}) nor a folder here, and {what}. {hint}"
        "Hub ids look like organisation/name; check the name and the network, or pass a folder."
    )
