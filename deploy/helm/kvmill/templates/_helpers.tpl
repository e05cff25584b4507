{{- define "kvmill.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{/* Names of objects: the release's, and the chart's unless the former has it. 50 characters leave room for suffixes. */}}
{{- define "kvmill.fullname" -}}
{{- $name := include "kvmill.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $full | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "kvmill.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvmill.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvmill.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kvmill.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kvmill.serviceAccountName" -}}
{{- ternary (.Values.serviceAccount.name | default (include "kvmill.fullname" .)) (.Values.serviceAccount.name | default "default") .Values.serviceAccount.create -}}
{{- end }}

{{- define "kvmill.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end }}

{{/* 64GiB, 500MB -> bytes */}}
{{- define "kvmill.bytes" -}}
{{- $units := dict "B" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 "KB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 -}}
{{- mul (regexFind "^[0-9]+" .) (get $units (regexFind "[A-Za-z]+$" .)) -}}
{{- end }}

{{/* 30s, 5m, 1h -> seconds */}}
{{- define "kvmill.seconds" -}}
{{- mul (regexFind "^[0-9]+" .) (get (dict "s" 1 "m" 60 "h" 3600) (regexFind "[smh]$" .)) -}}
{{- end }}

{{- define "kvmill.memory" -}}
{{- $gpu := ternary (include "kvmill.bytes" .Values.gpu.bytes) "0" (eq .Values.profile "gpu") -}}
{{- add (include "kvmill.bytes" .Values.hostBytes) (include "kvmill.bytes" .Values.memoryOverhead) (div $gpu 128) -}}
{{- end }}

{{- define "kvmill.gracePeriod" -}}
{{- add (include "kvmill.seconds" .Values.drain.timeout) .Values.drain.preStopSeconds .Values.drain.extraSeconds -}}
{{- end }}

{{/* Not empty when there are TCP listeners beside the metrics port. */}}
{{- define "kvmill.listens" -}}
{{- if or .Values.remote.enabled .Values.etcd.endpoints }}yes{{ end -}}
{{- end }}

{{- define "kvmill.usesUcx" -}}
{{- if and (include "kvmill.listens" .) .Values.dataPlane.enabled }}yes{{ end -}}
{{- end }}

{{/* Capabilities work for root only: no process of another user is given them. */}}
{{- define "kvmill.uid" -}}
{{- if or .Values.rdma.enabled .Values.manyHosts }}0{{ else }}{{ .Values.user.uid | int64 }}{{ end -}}
{{- end }}

{{- define "kvmill.etcdPasswordSecret" -}}
{{- if .Values.etcd.existingSecret }}{{ .Values.etcd.existingSecret }}{{ else if .Values.etcd.password }}{{ include "kvmill.fullname" . }}-etcd{{ end -}}
{{- end }}

{{/* HOST of this pod, and HOST:PORT, as the daemon takes them. */}}
{{- define "kvmill.podAddress" -}}
{{- ternary "[$(KVMILL_POD_IP)]" "$(KVMILL_POD_IP)" (eq .Values.ipFamily "IPv6") -}}
{{- end }}
{{- define "kvmill.anyAddress" -}}
{{- ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") -}}
{{- end }}
