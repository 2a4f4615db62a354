pytest_plugins = ["common.check.pytest_plugin"]
