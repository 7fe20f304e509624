"""`kvloom doctor`: checks that an engine works on this machine, and that a running fabric is closed to strangers, and
lists plugins. (`doctor deployment` is tools/cli/deployment.py.)

command.py   `doctor engine`
checks.py    its checks
session.py   records the steps of the engine under test
security.py  `doctor security`
findings.py  the results of checks of a running fabric
plugins.py   `doctor plugins`
"""
