"""The engine runs on a machine that has torch, numpy and safetensors.

Of the other distributions it imports only `turboserve.policies`, `turboserve.plugins`,
`turboserve.static_frozen` and `turboserve.wording`, which need the standard library alone.
"""

import pkgutil
import subprocess
import sys

import turboserve.worker.engine
import turboserve.worker.model

SCRIPT = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        root = name.split(".")[0]
        available = {"worker", "policies", "plugins", "static_frozen", "wording"}
        ours = root == "turboserve" and "." in name and name.split(".")[1] not in available
        services = {"pydantic", "nats", "av", "structlog", "opentelemetry", "fastapi", "sqlalchemy"}
        models = {"transformers", "diffusers", "tokenizers", "huggingface_hub", "ftfy"}
        if ours or root in services | models:
            raise ImportError(f"{name} is not on a bare GPU machine")
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_model_and_engine_import_without_the_services_world() -> None:
    names = [
        f"{package.__name__}.{module.name}"
        for package in (turboserve.worker.engine, turboserve.worker.model)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    assert len(names) > 20
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
