"""The process of :func:`memkern.planner.fake_cuda.call`: reads a function with its arguments, writes its result."""

import gc
import os
import pickle
import sys

from ...techniques.options import OptionError
from . import install

if __name__ == "__main__":
    # What the call prints must not get into the result.
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    install()
    from .gpu import patch  # only now: it imports torch

    patch()
    function, arguments = pickle.load(sys.stdin.buffer)
    from .. import fake_step  # noqa: F401 - what it imports is frozen, too

    # Python looks at all objects whenever there are a quarter more, which takes a sixth of a plan's time (gpt2-xl).
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        outcome = function(**arguments)
    except OptionError as error:
        outcome = error
    pickle.dump(outcome, result)
    result.close()
    sys.stderr.flush()
    # No destructors: those of libraries that made threads for the fake device have aborted ("terminate called without
    # an active exception") with the result already written.
    os._exit(0)
