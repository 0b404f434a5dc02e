"""Writes an image's bill of materials, CycloneDX 1.6 JSON, to /usr/share/glm53/sbom.cdx.json.

`python sbom.py IMAGE`, as root, in the image, as its last step. It lists what is really there: Debian packages from dpkg, Python
packages from their metadata. The same content gives the same bytes: there is no time in it, and its serial number is a hash of the rest.
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import uuid
from typing import Any

OUT = pathlib.Path("/usr/share/glm53/sbom.cdx.json")
_FORMAT = "${Package}\t${Version}\t${Architecture}\n"


def system_packages() -> list[dict[str, Any]]:
    """Installed Debian (or Ubuntu) packages."""
    release = dict(line.split("=", 1) for line in pathlib.Path("/etc/os-release").read_text().splitlines() if "=" in line)
    distribution, version_id = (release.get(name, "").strip('"') for name in ("ID", "VERSION_ID"))
    text = subprocess.run(["dpkg-query", "-W", f"-f={_FORMAT}"], capture_output=True, text=True, check=True).stdout
    components = []
    for line in text.splitlines():
        name, version, architecture = line.split("\t")
        purl = f"pkg:deb/{distribution}/{name}@{version}?arch={architecture}&distro={distribution}-{version_id}"
        components.append({"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl})
    return components


def python_packages() -> list[dict[str, Any]]:
    """Installed Python distributions, with the licence that their metadata states."""
    components = []
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
        component: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
        if expression := distribution.metadata.get("License-Expression"):
            component["licenses"] = [{"expression": expression}]
        components.append(component)
    return components


def document(image: str) -> dict[str, Any]:
    """The whole bill of materials of this image."""
    components = sorted(system_packages() + python_packages(), key=lambda component: component["purl"])
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": f"glm53-offload/{image}", "bom-ref": f"glm53-offload/{image}"}},
        "components": components,
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {**content, "serialNumber": f"urn:uuid:{serial}"}


if __name__ == "__main__":
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(document(sys.argv[1]), indent=1, sort_keys=True) + "\n")
