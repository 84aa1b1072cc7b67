"""Takes the place of vLLM's server: its flags and variables, the embedded engine behind them."""

import argparse
import json
import os
import sys

from tests.support.engine_process import serve_embedded

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--tensor-parallel-size", required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--max-model-len")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--enable-scale-out", action="store_true", required=True)
    parser.add_argument("--weight-transfer-config", type=json.loads)
    flags = parser.parse_args()
    sys.exit(
        serve_embedded(
            flags.host,
            int(flags.port),
            protocol="vllm",
            model=flags.served_model_name,
            max_model_len=flags.max_model_len,
            tensor_parallel_size=flags.tensor_parallel_size,
            dev_mode=str(os.environ.get("VLLM_SERVER_DEV_MODE") == "1").lower(),
            weight_transfer=str(flags.weight_transfer_config is not None).lower(),
            api_key=os.environ.get("VLLM_API_KEY"),
        )
    )
