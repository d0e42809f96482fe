"""Checks the RayCluster in docs/deploy/ray.yaml against kuberay's schema, and its pods against Kubernetes' own.

`make lint-deploy` runs it with its linters' Python, which knows nothing of Weft.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Raise an error that names what is wrong."""
    cluster = next(yaml.safe_load_all((ROOT / "docs/deploy/ray.yaml").read_text()))
    schema = json.loads((ROOT / "tests/support/raycluster_v1.json").read_text())
    jsonschema.Draft7Validator(schema).validate(cluster)
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


if __name__ == "__main__":
    sys.exit(main())
