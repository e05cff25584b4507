{{/* The daemon's configuration file. What differs from node to node comes by flags, in the DaemonSet. */}}
{{- define "kvmill.config" -}}
{{- $v := .Values -}}
{{- $any := include "kvmill.anyAddress" . -}}
{{- $config := dict
      "socket" "/run/kvmill/kvmill.sock"
      "metrics" (printf "%s:%d" $any (int $v.ports.metrics))
      "host_bytes" $v.hostBytes
      "huge_pages" $v.hugePages.mode
      "drain_timeout" $v.drain.timeout
      "log_level" $v.logLevel
      "log_format" $v.logFormat -}}
{{- if $v.watchConfig -}}{{- $_ := set $config "watch_config" "true" -}}{{- end -}}
{{- if $v.disk.enabled -}}
{{- $config = merge $config (dict "data_dir" "/var/lib/kvmill" "disk_bytes" $v.disk.bytes) -}}
{{- if $v.disk.encryption.existingSecret -}}
{{- $_ := set $config "disk_key_file" "/etc/kvmill/disk-keys/keys" -}}
{{- end -}}
{{- end -}}
{{- if eq $v.profile "gpu" -}}
{{- $config = merge $config (dict "gpu_bytes" $v.gpu.bytes "device" $v.gpu.device) -}}
{{- else -}}
{{- $config = merge $config (dict "device" "host") -}}
{{- end -}}
{{- if include "kvmill.listens" . -}}
{{- $_ := set $config "listen" (printf "%s:%d" $any (int $v.ports.grpc)) -}}
{{- if $v.tls.insecure -}}
{{- $_ := set $config "insecure" "true" -}}
{{- else -}}
{{- $config = merge $config (dict "tls_cert" "/etc/kvmill/tls/tls.crt" "tls_key" "/etc/kvmill/tls/tls.key" "tls_ca" "/etc/kvmill/tls/ca.crt"
      "tls_server_name" ($v.tls.serverName | default (printf "%s.%s.svc" (include "kvmill.fullname" .) .Release.Namespace))) -}}
{{- if $v.tls.peers -}}{{- $_ := set $config "tls_peers" (join "," $v.tls.peers) -}}{{- end -}}
{{- end -}}
{{- if and $v.dataPlane.enabled $v.dataPlane.plaintext -}}
{{- $_ := set $config "data_plane_plaintext" "true" -}}
{{- end -}}
{{- end -}}
{{- if $v.etcd.endpoints -}}
{{- $cluster := printf "etcd://%s" (join "," $v.etcd.endpoints) -}}
{{- if $v.etcd.prefix -}}{{- $cluster = printf "%s/%s" $cluster $v.etcd.prefix -}}{{- end -}}
{{- $config = merge $config (dict "cluster" $cluster "copies" (int $v.copies | toString) "replication_rate" $v.replicationRate) -}}
{{- if $v.etcd.tls.existingSecret -}}
{{- $_ := set $config "etcd_ca" "/etc/kvmill/etcd-tls/ca.crt" -}}
{{- if $v.etcd.tls.clientCertificate -}}
{{- $config = merge $config (dict "etcd_cert" "/etc/kvmill/etcd-tls/tls.crt" "etcd_key" "/etc/kvmill/etcd-tls/tls.key") -}}
{{- end -}}
{{- end -}}
{{- if $v.etcd.user -}}
{{- $config = merge $config (dict "etcd_user" $v.etcd.user "etcd_password_file" "/etc/kvmill/etcd-password/password") -}}
{{- end -}}
{{- end -}}
{{- with $v.zone.name -}}{{- $_ := set $config "zone" . -}}{{- end -}}
{{- if $v.tenants -}}{{- $_ := set $config "tenants" "/etc/kvmill/config/tenants.yaml" -}}{{- end -}}
{{- range $key, $value := $v.config -}}
{{- if hasKey $config $key -}}
{{- fail (printf "config.%s: the chart sets this option from another value; change that one" $key) -}}
{{- end -}}
{{- $_ := set $config $key (toString $value) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* What only another start takes over: the rest a daemon that watches its files does (docs/configuration.md). */}}
{{- define "kvmill.configOfStart" -}}
{{- $config := include "kvmill.config" . | fromYaml -}}
{{- if .Values.watchConfig -}}
{{- $config = omit $config "tls_peers" "tenants" "peer_timeout" "replication_rate" "log_format" "log_level" "host_high_watermark" "host_low_watermark" "gpu_high_watermark" "gpu_low_watermark" "drain_timeout" "session_grace" "error_sample_interval" "metrics_namespaces" "guard_action" "guard_key_error" "guard_value_error" "guard_samples" -}}
{{- toYaml $config -}}
{{- else -}}
{{- dict "config" $config "tenants" .Values.tenants | toYaml -}}
{{- end -}}
{{- end }}
