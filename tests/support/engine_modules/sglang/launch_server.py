"""Takes the place of SGLang's server: its flags and its file, the embedded engine behind them."""

import argparse
import json
import pathlib
import stat
import sys

from tests.support.engine_process import serve_embedded

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", type=pathlib.Path)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--tensor-parallel-size", required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--context-length")
    flags = parser.parse_args()
    keys = {}
    if flags.config is not None:
        mode = stat.S_IMODE(flags.config.stat().st_mode)
        assert mode == 0o600, oct(mode)
        keys = json.loads(flags.config.read_text(encoding="utf-8"))
    sys.exit(
        serve_embedded(
            flags.host,
            int(flags.port),
            protocol="sglang",
            model=flags.served_model_name,
            max_model_len=flags.context_length,
            api_key=keys.get("api-key"),
            admin_api_key=keys.get("admin-api-key"),
        )
    )
