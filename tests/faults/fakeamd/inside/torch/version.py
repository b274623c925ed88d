"""The releases that this stand-in claims, in the file where the suites read those of torch."""

import os

hip, rocm, cuda = os.environ.get("FAKEAMD_HIP"), None, None
