#!/opt/packages/bin/python
"""The images' health check: exits 0 when the service in this container says that it is ready."""

import os
import sys
from urllib.request import urlopen

try:
    urlopen(f"http://127.0.0.1:{os.environ['TURBOSERVE_HEALTH_PORT']}/readyz", timeout=3)
except OSError as error:
    sys.exit(f"not ready: {error}")
print("ready")
