"""A stand-in for Azure's resource manager and metadata service, as far as the real `az` uses them for one scale set.

It stores resources and returns them in Azure's form. It checks no quota, name or permission, and no operation takes time. Tests
therefore show that `az` makes these calls and that their order works, and nothing about Azure itself. Two parts are real: machines
of a scale set are sshd processes with their own files, and run-command runs its script there.

    arm.py FOLDER KEEP    FOLDER holds cert.pem and key.pem; each request is logged to requests.log in it
"""

import base64
import json
import os
import re
import secrets
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote_plus, urlsplit

FOLDER, KEEP = sys.argv[1:]
SUBSCRIPTION = "00000000-0000-0000-0000-000000000001"
TENANT = "00000000-0000-0000-0000-000000000002"
BASE = "https://127.0.0.1:5991"
ROOT = f"/subscriptions/{SUBSCRIPTION}"
# Nested lists whose items have their own resource ids.
PARTS = ("securityRules", "inboundNatRules", "outboundRules", "backendAddressPools", "frontendIPConfigurations", "subnets", "ipConfigurations")
lock = threading.RLock()
groups = {}
# Keyed by lower-case resource id.
things = {}
machines = {}
next_public = iter(range(10, 250))
next_private = iter(range(4, 250))


def token():
    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    claims = {"tid": TENANT, "oid": "1", "sub": "1", "appid": "1", "exp": 4102444800, "iat": 1, "nbf": 1, "xms_mirid": ROOT + "/x"}
    return ".".join([part({"alg": "none", "typ": "JWT"}), part(claims), "eA"])


def endpoints():
    return {
        "name": "bed", "portal": BASE, "resourceManager": BASE + "/", "graph": BASE, "graphAudience": BASE, "media": BASE, "gallery": BASE,
        "sqlManagement": BASE, "batch": BASE, "activeDirectoryDataLake": BASE, "vmImageAliasDoc": BASE,
        "authentication": {"loginEndpoint": BASE, "audiences": [BASE], "tenant": TENANT, "identityProvider": "AAD"},
        "suffixes": {"storage": "bed", "keyVaultDns": "bed", "sqlServerHostname": "bed", "mhsmDns": "bed"},
    }


def group_of(name):
    return f"{ROOT}/resourceGroups/{name}"


def split(path):
    """Splits a resource id into group, type, names, and whether it names one resource rather than a collection."""
    found = re.fullmatch(r"/subscriptions/[^/]+/resourcegroups/([^/]+)/providers/(.+)", path, re.I)
    if not found:
        return None
    words = found[2].split("/")
    kinds, names = words[1::2], words[2::2]
    return found[1], "/".join([words[0]] + kinds), names, len(kinds) == len(names)


def place_parts(thing):
    """Assigns resource ids to the items of nested lists."""
    for part in PARTS:
        for item in thing.get("properties", {}).get(part) or []:
            item["id"] = f"{thing['id']}/{part}/{item['name']}"
            item.setdefault("properties", {})["provisioningState"] = "Succeeded"
    return thing


def keep(path, body, group, kind, name):
    old = things.get(path.lower(), {})
    thing = dict(body, id=old.get("id", path), name=name, type=kind)
    thing.setdefault("properties", {})["provisioningState"] = "Succeeded"
    thing.setdefault("etag", "x")
    lower = kind.lower()
    if lower in ("microsoft.compute/virtualmachinescalesets", "microsoft.network/networkinterfaces"):
        # A PUT of these kinds keeps the properties that it omits; `az` never sends the virtual machine of a network card.
        thing = {**old, **thing, "properties": {**old.get("properties", {}), **thing["properties"]}}
    if lower == "microsoft.network/publicipaddresses":
        thing["properties"].setdefault("ipAddress", old.get("properties", {}).get("ipAddress") or f"192.0.2.{next(next_public)}")
    if lower == "microsoft.network/loadbalancers":
        for part in ("inboundNatRules", "outboundRules", "loadBalancingRules", "probes", "inboundNatPools"):
            thing["properties"].setdefault(part, [])
    if lower == "microsoft.network/networksecuritygroups":
        thing["properties"].setdefault("securityRules", [])
    things[path.lower()] = place_parts(thing)
    if lower == "microsoft.network/networkinterfaces":
        answer_at_public(thing)
    if lower == "microsoft.compute/virtualmachinescalesets":
        grow(thing, group)
    return thing


def answer_at_public(nic):
    """Makes the sshd of the machine behind a network card listen on its public address as well."""
    for config in nic["properties"].get("ipConfigurations", []):
        public = (config["properties"].get("publicIPAddress") or {}).get("id")
        machine = machines.get(nic["properties"].get("virtualMachine", {}).get("id", "").lower())
        if public and machine and not machine.get("public"):
            address = machine["public"] = things[public.lower()]["properties"]["ipAddress"]
            subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
            inside(machine, ["/usr/sbin/sshd", "-f", "/etc/ssh/sshd_config", "-o", f"ListenAddress={address}"])


def inside(machine, words, **more):
    enter = ["nsenter", f"--target={machine['process'].pid}", "--mount", "--uts", "--"]
    return subprocess.run(enter + words, capture_output=True, text=True, timeout=120, **more)


def grow(scale_set, group):
    """Starts machines up to the capacity of the scale set."""
    uniform = scale_set["properties"].get("orchestrationMode", "Uniform") == "Uniform"
    profile = scale_set["properties"]["virtualMachineProfile"]
    mine = [machine for machine in machines.values() if machine["set"] == scale_set["id"]]
    for number in range(len(mine), int(scale_set["sku"]["capacity"])):
        host = profile["osProfile"]["computerNamePrefix"] + (f"{number:06}" if uniform else secrets.token_hex(3))
        address = f"10.0.0.{next(next_private)}"
        if uniform:
            vm = f"{scale_set['id']}/virtualMachines/{number}"
            nic = f"{vm}/networkInterfaces/nic"
        else:
            vm = f"{group_of(group)}/providers/Microsoft.Compute/virtualMachines/{scale_set['name']}_{secrets.token_hex(4)}"
            nic = f"{group_of(group)}/providers/Microsoft.Network/networkInterfaces/{host}-nic"
        config = {"name": "ipconfig", "properties": {"privateIPAddress": address, "primary": True}}
        things[nic.lower()] = place_parts({
            "id": nic, "name": nic.split("/")[-1], "type": "Microsoft.Network/networkInterfaces", "location": scale_set["location"],
            "properties": {"provisioningState": "Succeeded", "virtualMachine": {"id": vm}, "ipConfigurations": [config]},
        })
        properties = {
            "vmId": secrets.token_hex(8), "provisioningState": "Succeeded", "osProfile": {"computerName": host},
            "networkProfile": {"networkInterfaces": [{"id": nic}]},
        }
        thing = {"id": vm, "name": vm.split("/")[-1], "location": scale_set["location"], "properties": properties}
        if uniform:
            thing.update(type="Microsoft.Compute/virtualMachineScaleSets/virtualMachines", instanceId=str(number))
        else:
            thing.update(type="Microsoft.Compute/virtualMachines")
            properties["virtualMachineScaleSet"] = {"id": scale_set["id"]}
        things[vm.lower()] = thing
        boot(vm, scale_set["id"], host, address, profile["osProfile"])


def boot(vm, scale_set, host, address, profile):
    place = f"{FOLDER}/vm-{host}"
    os.makedirs(place)
    keys = profile["linuxConfiguration"]["ssh"]["publicKeys"]
    with open(f"{place}/authorized_keys", "w") as file:
        file.write("".join(key["keyData"].strip() + "\n" for key in keys))
    with open(f"{place}/custom-data", "wb") as file:
        file.write(base64.b64decode(profile.get("customData", "")))
    words = ["unshare", "--mount", "--uts", "--propagation", "private", "bash", KEEP, "vm", FOLDER, host, address, profile["adminUsername"]]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    machines[vm.lower()] = {"process": process, "set": scale_set, "host": host}
    for _ in range(600):
        if os.path.exists(f"{place}/up"):
            return
        if process.poll() is not None:
            raise RuntimeError(f"{host} did not boot")
        threading.Event().wait(0.05)


def forget(path):
    """Deletes a resource, and the machines of a scale set with it."""
    thing = things.pop(path.lower(), None)
    for vm, machine in list(machines.items()):
        if thing and machine["set"].lower() == path.lower():
            machine["process"].kill()
            machine["process"].wait()
            del machines[vm]
            for other in [key for key, kept in things.items() if kept.get("properties", {}).get("virtualMachine", {}).get("id", "").lower() == vm]:
                del things[other]
            things.pop(vm, None)
    return thing


def run_command(vm, body):
    machine = machines[vm.lower()]
    ran = inside(machine, ["sh", "-s"], input="\n".join(body.get("script") or []) + "\n")
    # Azure keeps the end of both streams.
    message = f"Enable succeeded: \n[stdout]\n{ran.stdout[-4096:]}\n[stderr]\n{ran.stderr[-4096:]}"
    status = {"code": "ProvisioningState/succeeded", "level": "Info", "displayStatus": "Provisioning succeeded", "message": message}
    return {"value": [status]}


def deploy(path, body, group):
    """Deploys a template. `az` writes its resources in dependency order."""
    template = body["properties"]["template"]
    made = []
    for resource in template["resources"]:
        kind, name = resource["type"], resource["name"]
        words = [word for pair in zip(kind.split("/")[1:], name.split("/")) for word in pair]
        address = "/".join([group_of(group), "providers", kind.split("/")[0]] + words)
        thing = {key: value for key, value in resource.items() if key not in ("apiVersion", "dependsOn", "name", "type")}
        made.append(keep(address, thing, group, kind, name.split("/")[-1]))
    outputs = {}
    for name, output in (template.get("outputs") or {}).items():
        outputs[name] = {"type": output["type"], "value": made[-1]["properties"] if made and output["type"].lower() == "object" else ""}
    done = {"provisioningState": "Succeeded", "outputs": outputs, "mode": "Incremental", "outputResources": [{"id": thing["id"]} for thing in made]}
    things[path.lower()] = {"id": path, "name": path.split("/")[-1], "type": "Microsoft.Resources/deployments", "properties": done}
    return things[path.lower()]


def missing(path):
    name = path.split("/")[-1]
    code = "ResourceGroupNotFound" if "/providers/" not in path.lower() else "ResourceNotFound"
    return 404, {"error": {"code": code, "message": f"{name} was not found."}}


def on_group(method, name, body):
    key = name.lower()
    if method == "PUT":
        groups[key] = {"id": group_of(name), "name": name, "type": "Microsoft.Resources/resourceGroups", "location": body["location"],
                       "tags": body.get("tags"), "properties": {"provisioningState": "Succeeded"}}
        return 201, groups[key]
    if key not in groups:
        return missing(group_of(name))
    if method == "HEAD":
        return 204, None
    if method == "DELETE":
        for path in [path for path in things if path.startswith(group_of(name).lower() + "/")]:
            forget(path)
        del groups[key]
        return 200, None
    return 200, groups[key]


def on_list(group, kind, names):
    """Lists all resources of a type, in a group or in one scale set."""
    start = group_of(group).lower() + "/"
    if len(names) == 1 and kind.lower().endswith("/networkinterfaces"):
        inside_set = f"/virtualmachinescalesets/{names[0].lower()}/"
        found = [thing for path, thing in things.items() if path.startswith(start) and inside_set in path and path.split("/")[-2] == "networkinterfaces"]
    else:
        found = [thing for path, thing in things.items() if path.startswith(start) and thing["type"].lower() == kind.lower()]
    return 200, {"value": found}


def on_part(method, path, body):
    """Reads or writes an item of a nested list, which has a resource id but is stored in its parent."""
    above, part, name = path.rsplit("/", 2)
    part = next(known for known in PARTS if known.lower() == part.lower())
    thing = things.get(above.lower())
    if thing is None:
        return missing(above)
    rest = [item for item in thing["properties"].get(part) or [] if item["name"].lower() != name.lower()]
    found = [item for item in thing["properties"].get(part) or [] if item["name"].lower() == name.lower()]
    if method == "PUT":
        thing["properties"][part] = rest + [dict(body, name=name)]
        place_parts(thing)
        return 201, thing["properties"][part][-1]
    return (200, found[0]) if found else missing(path)


def on_thing(method, path, body, meant):
    group, kind, names, _ = meant
    if group.lower() not in groups:
        return missing(group_of(group))
    if kind.split("/")[-1].lower() in [part.lower() for part in PARTS] and len(names) == 2:
        return on_part(method, path, body)
    if kind.lower() == "microsoft.resources/deployments" and method == "PUT":
        return 201, deploy(path, body, group)
    if method == "PUT":
        return 201, keep(path, body, group, kind, names[-1])
    if method == "DELETE":
        return (200, None) if forget(path) else (204, None)
    thing = things.get(path.lower())
    if thing is None:
        return missing(path)
    return 200, thing


def answer(method, path, query, body):
    lower = path.lower().rstrip("/")
    if lower == "/metadata/endpoints":
        return 200, endpoints()
    if lower == "/metadata/identity/oauth2/token":
        return 200, {"access_token": token(), "expires_in": "86400", "expires_on": "4102444800", "resource": BASE, "token_type": "Bearer"}
    if lower == "/tenants":
        return 200, {"value": [{"id": f"/tenants/{TENANT}", "tenantId": TENANT}]}
    subscription = {"id": ROOT, "subscriptionId": SUBSCRIPTION, "tenantId": TENANT, "displayName": "bed", "state": "Enabled"}
    if lower == "/subscriptions":
        return 200, {"value": [subscription]}
    if lower == ROOT:
        return 200, subscription
    if lower == f"{ROOT}/resourcegroups":
        return 200, {"value": list(groups.values())}
    if lower == f"{ROOT}/resources":
        start = group_of(re.search(r"resourceGroup eq '([^']+)'", query)[1]).lower() + "/"
        kept = [thing for key, thing in things.items() if key.startswith(start) and key.count("/") == 8 and "deployments" not in thing["type"]]
        return 200, {"value": [{key: thing.get(key) for key in ("id", "name", "type", "location", "tags", "sku")} for thing in kept]}
    found = re.fullmatch(r"/subscriptions/[^/]+/resourcegroups/([^/]+)", path.rstrip("/"), re.I)
    if found:
        return on_group(method, found[1], body)
    if lower.endswith("/providers/microsoft.resources/tags/default"):
        thing = things[lower.removesuffix("/providers/microsoft.resources/tags/default")]
        thing["tags"] = {**(thing.get("tags") or {}), **body["properties"]["tags"]}
        return 200, {"id": path, "name": "default", "type": "Microsoft.Resources/tags", "properties": {"tags": thing["tags"]}}
    if lower.endswith("/runcommand"):
        return 200, run_command(path.rstrip("/").rsplit("/", 1)[0], body)
    image = re.search(r"/publishers/[^/]+/artifacttypes/vmimage/offers/[^/]+/skus/[^/]+/versions(/[^/]+)?$", lower)
    if image:
        version = {"id": path, "name": "1.0.0", "location": "westus3", "properties": {"hyperVGeneration": "V2", "osDiskImage": {"operatingSystem": "Linux"}}}
        return 200, version if image[1] else [version]
    if "/providers/microsoft.compute/skus" in lower or lower.endswith("/usages"):
        return 200, {"value": []}
    if lower.endswith("/validate"):
        return 200, {"properties": {"provisioningState": "Succeeded"}}
    meant = split(path)
    if meant is None:
        return missing(path)
    return on_thing(method, path, body, meant) if meant[3] else on_list(*meant[:3])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def work(self):
        path, query = urlsplit(self.path).path, unquote_plus(urlsplit(self.path).query)
        length = int(self.headers.get("content-length") or 0)
        text = self.rfile.read(length)
        with lock:
            try:
                status, body = answer(self.command, path, query, json.loads(text) if text.strip() else {})
            except Exception as error:
                status, body = 500, {"error": {"code": "Bed", "message": repr(error)}}
            with open(f"{FOLDER}/requests.log", "a") as log:
                log.write(f"{self.command} {path} {status}\n")
        sent = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = work

    def log_message(self, *_):
        """Silenced: requests are logged to requests.log."""


def serve(address, secure):
    server = ThreadingHTTPServer(address, Handler)
    if secure:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f"{FOLDER}/cert.pem", f"{FOLDER}/key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


serve(("169.254.169.254", 80), False)
serve(("127.0.0.1", 5991), True)
open(f"{FOLDER}/arm.ready", "w").close()
threading.Event().wait()
