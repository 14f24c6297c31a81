"""What this machine is (``facts``) and what it can do (``probe``)."""
