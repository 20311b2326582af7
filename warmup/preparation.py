# SPDX-License-Identifier: Apache-2.0
"""What a unit needs before its first trial, made while the unit before it is measured.

Listing a large space and estimating each of its configs takes a moment, in which the
GPU would wait. None of it depends on what has been measured.
"""

import functools
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from portable_backend.errors import PortableBackendError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.cost_model import preload
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.tools import Tools
from portable_backend.warmup.trial_log import space_digest
from portable_backend.warmup.tuning_options import TuneOptions

logger = logging.getLogger("vllm.portable_backend.tuner")


@dataclass(frozen=True)
class Prepared:
    """What can be tried for a key.

    Attributes:
        default: what serves without tuning.
        members: every config of the space.
        estimated: those kept, the best by estimate first; empty without a model.
        pruned: the others, and why.
        space: what is searched, in the order of the space, whatever the model thinks:
            the log depends on it.
        digest: of that.
    """

    default: KernelConfig
    members: frozenset[KernelConfig]
    estimated: Sequence[KernelConfig]
    pruned: Sequence[tuple[KernelConfig, str]]
    space: ListedSpace
    digest: str

    @functools.cached_property
    def pruned_lines(self) -> str:
        """`pruned` as lines of JSON; thousands of them."""
        rows = ({"config": c.to_dict(), "reason": reason} for c, reason in self.pruned)
        return "".join(json.dumps(row) + "\n" for row in rows)


def prepare(key: TuningKey, tools: Tools, options: TuneOptions) -> Prepared:
    """List the key's space and drop what the resource model rules out.

    Raises:
        ValueError: the key is no kernel's.
    """
    members = tools.catalog.configs(key)
    default = tools.catalog.default(key)
    estimated: list[KernelConfig] = []
    reasons: dict[KernelConfig, str] = {}
    searched: Sequence[KernelConfig] = members
    if tools.prune is not None:
        estimated, dropped = tools.prune(key, members, tools.device, keep=options.keep)
        reasons = {p.config: p.reason for p in dropped}
        most = options.candidates
        if most is not None and len(estimated) > most:
            late = f"not among the best {most} by estimate"
            reasons |= dict.fromkeys(estimated[most:], late)
            estimated = estimated[:most]
        reasons.pop(default, None)
        chosen = {default, *estimated}
        searched = [c for c in members if c in chosen]
        logger.debug("%s: pruned %d of %d", key, len(reasons), len(members))
    known = frozenset(members)
    if default not in known:
        searched = [default, *searched]
    space = ListedSpace(searched)
    digest = space_digest(space.configs)
    return Prepared(default, known, estimated, [*reasons.items()], space, digest)


class Preparer:
    """Prepares units, one of them ahead in a thread."""

    def __init__(self, options: TuneOptions) -> None:
        self._options = options
        self._ahead: tuple[TuningKey, Tools, threading.Thread] | None = None
        self._found: Prepared | None = None

    def begin(self, key: TuningKey, tools: Tools) -> None:
        """Prepare `key` meanwhile; what was begun for another key is forgotten."""
        self._end()

        def work() -> None:
            try:
                self._found = found = prepare(key, tools, self._options)
                _ = found.pruned_lines
                if self._options.warm_start:
                    preload()
            except (PortableBackendError, OSError, RuntimeError, ValueError) as error:
                # take() meets it again
                logger.debug("%s: not prepared ahead: %r", key, error)

        thread = threading.Thread(target=work, daemon=True)
        self._ahead = key, tools, thread
        thread.start()

    def look(self, key: TuningKey, *, wait: bool) -> Prepared | None:
        """What was prepared ahead for `key`, if it was and once it is."""
        if self._ahead is None or self._ahead[0] != key:
            return None
        if wait:
            self._ahead[2].join()
        return self._found

    def take(self, key: TuningKey, tools: Tools) -> Prepared:
        """What `prepare` returns, or raises."""
        ahead, found = self._ahead, self._end()
        if found is not None and ahead is not None and ahead[:2] == (key, tools):
            return found
        return prepare(key, tools, self._options)

    def _end(self) -> Prepared | None:
        if self._ahead is not None:
            self._ahead[2].join()
        found, self._found, self._ahead = self._found, None, None
        return found
