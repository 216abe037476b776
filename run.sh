cd /tmp/helper5; PYTHONPATH=/work/main timeout ${2:-580} /tmp/w/venv/bin/python $1 2>&1 | grep -v -E "absl|oneDNN|cudart|^I0000|^WARNING: All"
