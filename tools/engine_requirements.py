"""Print the requirements of an engine distribution, less torch and what text models do not import."""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

SKIPPED = {"torch", "torchaudio", "torchvision", "torchcodec"}

for requirement in map(Requirement, requires(sys.argv[1]) or []):
    if requirement.name not in SKIPPED and "extra" not in str(requirement.marker or ""):
        print(requirement)
