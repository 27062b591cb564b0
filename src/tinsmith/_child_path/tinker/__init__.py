"""What `import tinker` finds in a process that a program on `as_tinker` spawned.

Such a process begins anew, with its parent's `sys.path` alone. On that path `as_tinker` puts the
folder of this module, which puts tinsmith in its own place.
"""

import importlib
import sys

import tinsmith

del sys.modules["tinker"]
tinsmith.as_tinker()
importlib.import_module("tinker")
