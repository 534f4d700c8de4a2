"""The images of the test: Offbeat's own on the pinned base, or all on a base made here.

Without a registry of images the base is Debian by `debootstrap`, and Redis, MinIO, PostgreSQL and
rclone are stand-ins of `deploy/compose/offline/`. pip is configured as it is on this machine; the
configuration is a secret of the build and in no image.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.compose.commands import Commands, ComposeTestError

BASE = "offbeat-test-base:bookworm"
BASE_PACKAGES = "ca-certificates,python3,python3-venv"
DEBIAN = "bookworm"
"""Its Python is 3.11."""
OFFLINE = Path("deploy/compose/offline")
STAND_INS = ("minio", "postgres", "rclone", "redis")
WHEELS = Path("deploy/images/wheels")
PIP_OPTIONS = ("index-url", "extra-index-url", "trusted-host", "timeout", "retries")
"""What of pip's configuration means the same inside a build."""
NETWORK_SCHEMES = ("http://", "https://")


def build_images(commands: Commands, docker: str, *, pulled: bool) -> None:
    """All images that the stack is started from. `pulled`: registries of images are reached."""
    with _pip_secrets(commands) as secrets:
        flags = [*secrets]
        if not pulled:
            _make_base(commands, docker)
            for name in STAND_INS:
                commands.run(
                    *(docker, "build", "--build-arg", f"BASE={BASE}", *secrets),
                    *("--target", name, "--tag", f"offbeat-test-{name}", str(OFFLINE)),
                )
            # Debian's Python has its headers in a package of its own.
            flags += ["--build-arg", f"BASE={BASE}"]
            flags += ["--build-arg", "'BUILD_PACKAGES=gcc python3-dev'"]
        if any(WHEELS.glob("torch-*+cpu-*.whl")):
            flags += ["--build-arg", "TORCH_CPU_INDEX="]
        commands.run("make", "images", f"DOCKER={docker}", f"BUILD_FLAGS={' '.join(flags)}")


def _make_base(commands: Commands, docker: str) -> None:
    """Debian with Python, as an image; once."""
    if commands.attempt(docker, "image", "inspect", BASE).returncode == 0:
        return
    debootstrap = shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin")
    if debootstrap is None or os.geteuid() != 0:
        raise ComposeTestError(
            "the base image is made by debootstrap, as root: `apt-get install debootstrap`. Where "
            "images can be pulled, `make compose-test PULL=1` does without"
        )
    with TemporaryDirectory(prefix="offbeat-base-") as folder:
        root, archive = Path(folder, "root"), Path(folder, "root.tar")
        commands.run(
            debootstrap, "--variant=minbase", f"--include={BASE_PACKAGES}", DEBIAN, str(root)
        )
        for package in (root / "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        commands.run("tar", "--create", "--file", str(archive), "--directory", str(root), ".")
        commands.run(docker, "import", str(archive), BASE)


@contextmanager
def _pip_secrets(commands: Commands) -> Iterator[tuple[str, ...]]:
    """Flags that give a build this machine's pip configuration and authorities; local wheels of
    torch are laid where builds find them."""
    listed = commands.output(sys.executable, "-m", "pip", "config", "list")
    options = dict(pip_options(listed))
    _offer_wheels(options)
    with TemporaryDirectory(prefix="offbeat-pip-") as folder:
        lines = [
            "[global]",
            *(f"{name} = {options[name]}" for name in PIP_OPTIONS if name in options),
        ]
        flags: tuple[str, ...] = ()
        if authority := options.get("cert"):
            lines.append("cert = /run/secrets/ca")
            flags = ("--secret", f"id=ca,src={authority}")
        configuration = Path(folder, "pip.conf")
        configuration.write_text("\n".join(lines) + "\n")
        yield *flags, "--secret", f"id=pip,src={configuration}"


def pip_options(listed: str) -> Iterator[tuple[str, str]]:
    """Options of `pip config list`, those of the environment last. Indexes that are folders of this
    machine are left out."""
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, quoted = line.partition("=")
        option, value = name.rpartition(".")[2], quoted.strip("'")
        if option.endswith("index-url"):
            value = " ".join(url for url in value.split() if url.startswith(NETWORK_SCHEMES))
        if value:
            yield option, value


def _offer_wheels(options: Mapping[str, str]) -> None:
    """torch for CPUs, where pip would find it in a folder of this machine."""
    version = f"cp{sysconfig.get_config_var('py_version_nodot')}"
    for folder in options.get("find-links", "").split():
        for wheel in Path(folder).glob(f"torch-*+cpu-{version}-*.whl"):
            if not (WHEELS / wheel.name).exists():
                shutil.copy(wheel, WHEELS)
